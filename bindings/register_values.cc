// Python face of hooks/values.h: the table of named values.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/register.h"
#include "hooks/values.h"

namespace py = pybind11;

namespace vlscope {

void register_values(py::module_& module) {
  py::class_<Value>(module, "Value", "One named value of a kind of module.")
      .def_readonly("name", &Value::name)
      .def_readonly("layout", &Value::layout)
      .def_readonly("dims", &Value::dims)
      .def_readonly("description", &Value::description)
      .def_readonly("read_only", &Value::read_only)
      .def_readonly("unavailable", &Value::unavailable)
      .def_property_readonly("needs",
                             [](const Value& self) {
                               return self.needs == Needs::kImage   ? "image"
                                      : self.needs == Needs::kVideo ? "video"
                                                                    : "";
                             })
      .def_readonly("list", &Value::list);

  py::class_<Field>(module, "Field", "One argument of a module's call, or one part of its result.")
      .def_readonly("name", &Field::name)
      .def_readonly("keyword", &Field::keyword)
      .def_readonly("slots", &Field::slots)
      .def_readonly("read_only", &Field::read_only);

  py::enum_<Form>(module, "Form", "What a module's output is.")
      .value("tensor", Form::kTensor)
      .value("tuple", Form::kTuple)
      .value("record", Form::kRecord);

  py::class_<Kind>(module, "Kind", "A kind of module: its values and the shape of its call.")
      .def_readonly("name", &Kind::name)
      .def_readonly("doc", &Kind::doc)
      .def_readonly("inputs", &Kind::inputs)
      .def_readonly("form", &Kind::form)
      .def_readonly("outputs", &Kind::outputs)
      .def_readonly("values", &Kind::values)
      .def_property_readonly("aliases", [](const Kind& self) {
        py::dict aliases;
        for (const Alias& alias : self.aliases) aliases[py::str(alias.name)] = alias.target;
        return aliases;
      });

  module.def("all_kinds", &all_kinds, py::return_value_policy::reference,
             "Every kind of module, in the order of the reference pages.");
}

}  // namespace vlscope
