// How the attribute of a module becomes a live tensor: `model.layers[3].layer_output`.
//
// A read comes right after the forward has computed, with the interpreter pushed out of the
// processor's caches, and each Python frame that it then enters costs several times the read
// itself. So the way from the attribute to the running trace is written against CPython: three
// plain types, from which the Python classes `Module` and `Tracer` derive, and no bytecode.
#include <pybind11/pybind11.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>

#include "bindings/register.h"
#include "bindings/running_trace.h"

namespace py = pybind11;

namespace vlscope {
namespace {

/// Base of `Tracer`. `running` is what `core` holds, while the block is open. `armed` is 0, or one
/// more than the order of the first location where the tracer itself has something to do.
struct TracerObject {
  PyObject_HEAD;
  PyObject* model;
  PyObject* core;
  RunningTrace* running;
  int armed;
};

/// Base of `Module`: where its sites start, and the tracer that it is bound to, if any.
struct ModuleObject {
  PyObject_HEAD;
  PyObject* model;
  PyObject* tracer;
  int index, inputs, outputs, values;
};

/// The getter and the setter of one value, as `property` wants them: called with a module, or with
/// a module and what to assign.
struct AccessorObject {
  PyObject_HEAD;
  vectorcallfunc call;
  std::size_t first;  ///< Offset in ModuleObject of the number that the site is counted from.
  int offset;
};

PyTypeObject* tracer_type = nullptr;
PyTypeObject* module_type = nullptr;
PyObject* open_tracers = nullptr;  ///< ContextVar: the tracers whose blocks a task is in.
PyObject* open_name = nullptr;     ///< "_open"
PyObject* write_name = nullptr;    ///< "_write"
PyObject* visit_name = nullptr;    ///< "_visit"

/// Runs `body`; what it throws becomes the Python error.
template <class Body>
// What a translator of exceptions throws itself ends the process, as in pybind11.
// NOLINTNEXTLINE(bugprone-exception-escape)
auto guarded(Body body, decltype(body()) failed) noexcept {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return failed;
}

bool is_tracer(PyObject* object) { return PyObject_TypeCheck(object, tracer_type); }

/// The innermost open tracer of a model in this task; nullptr if there is none.
TracerObject* innermost(PyObject* model) {
  PyObject* tracers = nullptr;
  if (PyContextVar_Get(open_tracers, nullptr, &tracers) < 0) throw py::error_already_set();
  const auto held = py::reinterpret_steal<py::tuple>(tracers);
  for (Py_ssize_t i = PyTuple_GET_SIZE(tracers) - 1; i >= 0; --i) {
    PyObject* item = PyTuple_GET_ITEM(tracers, i);
    if (!is_tracer(item)) continue;
    auto* tracer = reinterpret_cast<TracerObject*>(item);
    if (tracer->model == model && tracer->running) return tracer;
  }
  return nullptr;
}

/// A running trace, and the references that keep it while this thread is inside.
struct Running {
  RunningTrace* trace = nullptr;
  py::object core, tracer;
};

/// The running trace that a module's values belong to; none if it is not open.
Running running(const ModuleObject& module) {
  const bool bound = module.tracer && is_tracer(module.tracer);
  auto* tracer = bound ? reinterpret_cast<TracerObject*>(module.tracer) : innermost(module.model);
  if (!tracer || !tracer->running) return {};
  return {tracer->running, py::reinterpret_borrow<py::object>(tracer->core),
          py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(tracer))};
}

/// The same, after what the tracer itself has to do up to the site.
Running running_at(const ModuleObject& module, int site) {
  Running found = running(module);
  if (!found.trace) return found;
  const auto* tracer = reinterpret_cast<const TracerObject*>(found.tracer.ptr());
  if (tracer->armed == 0) return found;
  const int order = found.trace->order(site);
  if (order + 1 >= tracer->armed) found.tracer.attr(py::handle(visit_name))(order);
  return found;
}

/// Python's `Module._open(site)`, which says why no trace is open.
[[noreturn]] void refuse(PyObject* module, int site) {
  const auto number = py::reinterpret_steal<py::object>(PyLong_FromLong(site));
  const auto opened = py::reinterpret_steal<py::object>(
      PyObject_CallMethodObjArgs(module, open_name, number.ptr(), nullptr));
  if (!opened) throw py::error_already_set();
  throw std::logic_error("a trace was found open that was not open");
}

/// What a slower way to a site begins with: None if no trace is open.
py::object tracer_at(const py::handle& module, int site) {
  if (!PyObject_TypeCheck(module.ptr(), module_type)) throw py::type_error("give a module");
  Running found = running_at(*reinterpret_cast<ModuleObject*>(module.ptr()), site);
  return found.trace ? std::move(found.tracer) : py::object(py::none());
}

PyObject* read(PyObject* module, int site) {
  const auto [trace, core, tracer] = running_at(*reinterpret_cast<ModuleObject*>(module), site);
  if (!trace) refuse(module, site);
  return THPVariable_Wrap(trace->read(site));
}

PyObject* write(PyObject* module, int site, PyObject* value) {
  const auto [trace, core, tracer] = running_at(*reinterpret_cast<ModuleObject*>(module), site);
  if (trace && THPVariable_Check(value) && trace->writable(site)) {
    trace->write(site, THPVariable_Unpack(value));
    Py_RETURN_NONE;
  }
  // What cannot be written is refused there.
  const auto number = py::reinterpret_steal<py::object>(PyLong_FromLong(site));
  return PyObject_CallMethodObjArgs(module, write_name, number.ptr(), value, nullptr);
}

PyObject* access(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject*) {
  const auto count = PyVectorcall_NARGS(flags);
  if (count < 1 || count > 2 || !PyObject_TypeCheck(arguments[0], module_type)) {
    PyErr_SetString(PyExc_TypeError, "an accessor takes a module, and a value to assign");
    return nullptr;
  }
  const auto& accessor = *reinterpret_cast<AccessorObject*>(self);
  PyObject* module = arguments[0];
  const int first = *reinterpret_cast<int*>(reinterpret_cast<char*>(module) + accessor.first);
  const int site = first + accessor.offset;
  return guarded(
      [&] { return count == 1 ? read(module, site) : write(module, site, arguments[1]); }, nullptr);
}

// --- The types ----------------------------------------------------------------------------------

template <class Object>
int traverse(PyObject* self, visitproc visit, void* arg) {
  auto* object = reinterpret_cast<Object*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(object->model);
  if constexpr (std::is_same_v<Object, TracerObject>) {
    Py_VISIT(object->core);
  } else {
    Py_VISIT(object->tracer);
  }
  return 0;
}

template <class Object>
int clear(PyObject* self) {
  auto* object = reinterpret_cast<Object*>(self);
  Py_CLEAR(object->model);
  if constexpr (std::is_same_v<Object, TracerObject>) {
    object->running = nullptr;
    Py_CLEAR(object->core);
  } else {
    Py_CLEAR(object->tracer);
  }
  return 0;
}

template <class Object>
void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear<Object>(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* get_core(PyObject* self, void*) {
  PyObject* core = reinterpret_cast<TracerObject*>(self)->core;
  return Py_NewRef(core ? core : Py_None);
}

int set_core(PyObject* self, PyObject* value, void*) {
  return guarded(
      [&] {
        auto* tracer = reinterpret_cast<TracerObject*>(self);
        const bool open = value && value != Py_None;
        tracer->running = open ? py::cast<RunningTrace*>(py::handle(value)) : nullptr;
        Py_XINCREF(value);
        Py_XSETREF(tracer->core, value);
        return 0;
      },
      -1);
}

PyObject* new_accessor(PyTypeObject* type, PyObject* arguments, PyObject*) {
  const char* first = nullptr;
  int offset = 0;
  if (!PyArg_ParseTuple(arguments, "si", &first, &offset)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  auto* accessor = reinterpret_cast<AccessorObject*>(self);
  const std::string_view name(first);
  accessor->call = access;
  accessor->offset = offset;
  accessor->first = name == "inputs"    ? offsetof(ModuleObject, inputs)
                    : name == "outputs" ? offsetof(ModuleObject, outputs)
                                        : offsetof(ModuleObject, values);
  return self;
}

PyTypeObject* make_type(const char* name, std::size_t size, unsigned int flags,
                        PyType_Slot* slots) {
  PyType_Spec spec{name, static_cast<int>(size), 0, flags, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

template <class Object>
PyTypeObject* make_base(const char* name, const char* doc, PyMemberDef* members,
                        PyGetSetDef* getset) {
  PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse<Object>)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear<Object>)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<Object>)},
                         {Py_tp_members, members},
                         {Py_tp_getset, getset},
                         {Py_tp_doc, const_cast<char*>(doc)},
                         {0, nullptr}};
  return make_type(name, sizeof(Object),
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots);
}

PyMemberDef tracer_members[] = {
    {"_model", T_OBJECT, offsetof(TracerObject, model), 0, "The model that is traced."},
    {"_armed", T_INT, offsetof(TracerObject, armed), 0, "0, or 1 + where its own visits begin."},
    {}};
PyGetSetDef tracer_getset[] = {
    {"_core", get_core, set_core, "The running trace; None while the block is not open.", nullptr},
    {}};
PyMemberDef module_members[] = {
    {"_model", T_OBJECT, offsetof(ModuleObject, model), 0, "The model that it belongs to."},
    {"_tracer", T_OBJECT, offsetof(ModuleObject, tracer), 0, "The tracer it is bound to, or None."},
    {"_index", T_INT, offsetof(ModuleObject, index), 0, "Its number in the engine's list."},
    {"_inputs", T_INT, offsetof(ModuleObject, inputs), 0, "First site of its inputs."},
    {"_outputs", T_INT, offsetof(ModuleObject, outputs), 0, "First site of its outputs."},
    {"_values", T_INT, offsetof(ModuleObject, values), 0, "First site of its values."},
    {}};
PyGetSetDef no_getset[] = {{}};
PyMemberDef accessor_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(AccessorObject, call), READONLY, nullptr}, {}};

PyTypeObject* make_accessor_type() {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_accessor)},
                         {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                         {Py_tp_members, accessor_members},
                         {0, nullptr}};
  return make_type("vlscope._core.Accessor", sizeof(AccessorObject),
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots);
}

}  // namespace

void register_access(py::module_& module) {
  tracer_type = make_base<TracerObject>("vlscope._core.TracerBase", "A tracer's link to its trace.",
                                        tracer_members, tracer_getset);
  module_type = make_base<ModuleObject>(
      "vlscope._core.ModuleBase", "A module's place in the engine.", module_members, no_getset);
  open_tracers = PyContextVar_New("vlscope_open_tracers", py::tuple().ptr());
  open_name = PyUnicode_InternFromString("_open");
  write_name = PyUnicode_InternFromString("_write");
  visit_name = PyUnicode_InternFromString("_visit");
  if (!open_tracers || !open_name || !write_name || !visit_name) throw py::error_already_set();
  module.attr("TracerBase") = py::handle(reinterpret_cast<PyObject*>(tracer_type));
  module.attr("ModuleBase") = py::handle(reinterpret_cast<PyObject*>(module_type));
  module.attr("Accessor") =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(make_accessor_type()));
  module.attr("OPEN") = py::handle(open_tracers);
  module.def("tracer_at", &tracer_at, py::arg("module"), py::arg("site"),
             "The open tracer that a site of a module belongs to, or None.");
}

}  // namespace vlscope
