// One spdlog logger for the engine, whose messages a host language can take over.
#pragma once

#include <spdlog/logger.h>

#include <functional>
#include <string_view>

namespace vlscope {

/// Receives a finished message and its level (spdlog's: 0 trace ... 5 critical).
using LogReceiver = std::function<void(int level, std::string_view message)>;

/// The engine's logger, named "vlscope". Writes to stderr until `send_logs_to` is called.
spdlog::logger& log();

/// Sends every message of the engine to `receiver` from now on, in place of stderr.
void send_logs_to(LogReceiver receiver);

}  // namespace vlscope
