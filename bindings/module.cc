// The extension module `vlscope._core`: one register_* for each part of the engine.
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

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

void raise_out_of_memory(const std::string& what) {
  const std::string text = fmt::format(
      "memory ran out: {}. The trace has ended, the model works on. Read or save fewer values, or "
      "give a shorter prompt; vlscope.estimate(model, prompt, sites) tells how many bytes values "
      "take.",
      what);
  const py::object type = py::module_::import("vlscope.errors").attr("OutOfMemory");
  PyErr_SetString(type.ptr(), text.c_str());
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 says what a translator takes.
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
  } catch (const std::bad_alloc&) {
    raise_out_of_memory("the allocator gave no more");
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    if (what.find("can't allocate memory") != std::string::npos ||
        what.find("out of memory") != std::string::npos) {
      return raise_out_of_memory(what);
    }
    PyErr_SetString(PyExc_RuntimeError, what.c_str());
  }
}

PyObject* refuse_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyErr_Format(
      PyExc_TypeError,
      "%s objects belong to a loaded model and are made by it alone: call vlscope.load(path)",
      type->tp_name);
  return nullptr;
}

newfunc make_new = nullptr;  ///< What pybind11 makes an instance with, before its constructor.

PyObject* new_with_arguments(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  const bool none = PyTuple_GET_SIZE(arguments) == 0 && (!keywords || PyDict_Size(keywords) == 0);
  return (none ? refuse_new : make_new)(type, arguments, keywords);
}

/// Without a C++ object behind it an instance holds memory that nobody has initialised.
void refuse_raw_instances(const py::module_& module) {
  const auto replace_new = [&module](const char* name, newfunc replacement) {
    auto* type = reinterpret_cast<PyTypeObject*>(module.attr(name).ptr());
    make_new = std::exchange(type->tp_new, replacement);
    PyType_Modified(type);
  };
  for (const char* name : {"Inputs", "Recording"}) replace_new(name, new_with_arguments);
  for (const char* name : {"Trace", "Model", "Site", "Value", "Field", "Kind"}) {
    replace_new(name, refuse_new);
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
  vlscope::refuse_raw_instances(module);
}
