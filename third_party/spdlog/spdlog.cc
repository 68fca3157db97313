// spdlog's compiled half, once per build, with the sinks that write to standard streams. Debian
// ships it only as a shared library, which a wheel must not depend on, and using spdlog as
// headers alone would cost every file six more seconds.

#include <spdlog/common-inl.h>
#include <spdlog/details/backtracer-inl.h>
#include <spdlog/details/log_msg-inl.h>
#include <spdlog/details/log_msg_buffer-inl.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/os-inl.h>
#include <spdlog/details/periodic_worker-inl.h>
#include <spdlog/details/registry-inl.h>
#include <spdlog/logger-inl.h>
#include <spdlog/pattern_formatter-inl.h>
#include <spdlog/sinks/ansicolor_sink-inl.h>
#include <spdlog/sinks/base_sink-inl.h>
#include <spdlog/sinks/sink-inl.h>
#include <spdlog/sinks/stdout_sinks-inl.h>
#include <spdlog/spdlog-inl.h>

#include <mutex>

namespace spdlog::sinks {

template class base_sink<std::mutex>;
template class base_sink<details::null_mutex>;

template class stdout_sink_base<details::console_mutex>;
template class stdout_sink<details::console_mutex>;
template class stderr_sink<details::console_mutex>;

// The registry's default logger writes to this one.
template class ansicolor_sink<details::console_mutex>;
template class ansicolor_stdout_sink<details::console_mutex>;

}  // namespace spdlog::sinks
