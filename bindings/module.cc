// The extension module `vlscope._core`: one register_* for each part of the engine.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "bindings/register.h"
#include "core/errors.h"
#include "core/logging.h"

namespace py = pybind11;

namespace vlscope {
namespace {

void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("vlscope.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const LateEditError& error) {
    raise("LateEditError", error);
  } catch (const NotReachedError& error) {
    raise("NotReachedError", error);
  } catch (const OutOfOrderError& error) {
    raise("OutOfOrderError", error);
  } catch (const Unavailable& error) {
    raise("Unavailable", error);
  } catch (const InputError& error) {
    raise("InputError", error);
  } catch (const CheckpointNotFound& error) {
    raise("CheckpointNotFound", error);
  } catch (const CheckpointError& error) {
    raise("CheckpointError", error);
  } catch (const UnsupportedFamily& error) {
    raise("UnsupportedFamily", error);
  } catch (const ConfigError& error) {
    raise("ConfigError", error);
  } catch (const Error& error) {
    raise("VlscopeError", error);
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  }
}

/// Sends the engine's messages to Python's `logging` under the name "vlscope".
void log_to_python() {
  send_logs_to([](int level, std::string_view message) {
    constexpr int kPythonLevel[] = {5, 10, 20, 30, 40, 50};  // spdlog's trace ... critical
    const py::gil_scoped_acquire gil;
    py::module_::import("logging").attr("getLogger")("vlscope").attr("log")(
        kPythonLevel[level], "%s", std::string(message));
  });
}

}  // namespace
}  // namespace vlscope

PYBIND11_MODULE(_core, module) {
  py::register_exception_translator(vlscope::translate);
  vlscope::log_to_python();
  vlscope::register_values(module);
  vlscope::register_trace(module);
  vlscope::register_access(module);
  vlscope::register_model(module);
  vlscope::register_processing(module);
}
