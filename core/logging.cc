#include "core/logging.h"

#include <spdlog/details/null_mutex.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <memory>
#include <string>
#include <utility>

namespace vlscope {
namespace {

// Holds no lock of its own: a receiver may wait for a host lock (Python's) that another thread
// holds while it logs.
class ReceiverSink : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit ReceiverSink(LogReceiver receiver) : receiver_(std::move(receiver)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    receiver_(static_cast<int>(message.level),
              std::string_view(message.payload.data(), message.payload.size()));
  }
  void flush_() override {}

  LogReceiver receiver_;
};

std::shared_ptr<spdlog::logger>& logger() {
  static auto logger = std::make_shared<spdlog::logger>(
      "vlscope", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  return logger;
}

}  // namespace

spdlog::logger& log() { return *logger(); }

void send_logs_to(LogReceiver receiver) {
  logger()->sinks() = {std::make_shared<ReceiverSink>(std::move(receiver))};
}

}  // namespace vlscope
