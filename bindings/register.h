// One function for each part of the engine that Python sees.
#pragma once

#include <pybind11/pybind11.h>

namespace vlscope {

void register_values(pybind11::module_& module);
void register_trace(pybind11::module_& module);
void register_access(pybind11::module_& module);
void register_model(pybind11::module_& module);
void register_processing(pybind11::module_& module);

}  // namespace vlscope
