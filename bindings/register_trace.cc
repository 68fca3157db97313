// Python face of hooks/trace.h.
#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <utility>

#include "bindings/register.h"
#include "bindings/running_trace.h"
#include "core/errors.h"
#include "core/ops/precision.h"
#include "core/ordinary_mode.h"
#include "models/text/decoder.h"
#include "models/text/delta_net.h"

namespace py = pybind11;

namespace vlscope {
namespace {

/// Lets Ctrl-C end a run. Looks at most every 50 ms: taking the GIL may mean waiting for it.
void check_interrupt() {
  using Clock = std::chrono::steady_clock;
  thread_local Clock::time_point last = Clock::now();
  const Clock::time_point now = Clock::now();
  if (now - last < std::chrono::milliseconds(50)) return;
  last = now;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

/// Gives a tensor without a graph storage of its own, and parts it from what it was a view of: a
/// view made while gradients may be recorded keeps its base alive, whatever its own storage.
void own_storage(const at::Tensor& tensor) {
  tensor.set_data(tensor.detach().clone());
  tensor.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
}

/// A site under the name of the method that goes there.
Site method_site(Site site, const char* method) {
  site.path = fmt::format("{}.{}", site.host->site_path(), method);
  return site;
}
/// The site of the queries as a reader of rows knows it.
Site row_site(Site queries) { return method_site(std::move(queries), "attention_row"); }

}  // namespace

RunningTrace::Use::Use(RunningTrace& trace) : trace_(trace) {
  std::thread::id nobody;
  if (trace.user_.compare_exchange_strong(nobody, std::this_thread::get_id())) return;
  throw Error(
      "this trace is being advanced by another thread, or by the code that a signal has "
      "interrupted. "
      "Give each thread a trace of its own.");
}

void RunningTrace::check_edits() {
  const Use use(*this);
  trace_->check_edits();
}

void RunningTrace::hand_over(RunningTrace& next) {
  const Use use(*this), use_next(next);
  next.trace_->inherit(*trace_);
  next.elements_ = elements_;
  trace_->close();
}

void RunningTrace::close() {
  if (user_.load() == std::this_thread::get_id()) const Use use(*this);  // Throws: see there.
  const py::gil_scoped_release released;
  std::thread::id nobody;
  while (!user_.compare_exchange_weak(nobody, std::this_thread::get_id())) {
    nobody = std::thread::id();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  trace_->close();
  user_.store(std::thread::id());
}

at::Tensor RunningTrace::read(int index) {
  const Use use(*this);
  const Site& wanted = site(index);
  if (trace_->stands_at(wanted)) return trace_->read(wanted);
  const py::gil_scoped_release released;
  return trace_->read(wanted);
}

int RunningTrace::order(int index) const {
  const Location* location = site(index).location;
  return location ? location->order() : -1;
}

bool RunningTrace::writable(int index) const {
  return site(index).read_only.empty() && site(index).unavailable.empty();
}

void RunningTrace::write(int index, at::Tensor value) {
  const Use use(*this);
  const Site& wanted = site(index);
  if (trace_->stands_at(wanted)) return trace_->write(wanted, std::move(value));
  const py::gil_scoped_release released;
  trace_->write(wanted, std::move(value));
}

std::vector<at::Tensor> RunningTrace::read_list(int index) {
  const Use use(*this);
  const py::gil_scoped_release released;
  std::vector<at::Tensor> values;
  for (const Site* site : elements(index)) values.push_back(trace_->read(*site));
  return values;
}

void RunningTrace::write_list(int index, const std::vector<at::Tensor>& values) {
  const Use use(*this);
  const py::gil_scoped_release released;
  const std::vector<const Site*> sites = elements(index);
  if (values.size() != sites.size()) {
    throw InputError(fmt::format("{} is a tuple of {} tensors; {} were assigned.", site(index).path,
                                 sites.size(), values.size()));
  }
  for (std::size_t i = 0; i < sites.size(); ++i) trace_->check_value(*sites[i], values[i]);
  for (std::size_t i = 0; i < sites.size(); ++i) trace_->write(*sites[i], values[i]);
}

std::int64_t RunningTrace::count_queries(int index) {
  const Use use(*this);
  const py::gil_scoped_release released;
  return trace_->peek(row_site(site(index))).size(2);
}

at::Tensor RunningTrace::attention_rows(int index, const ops::RowChoice& rows, bool scores) {
  const Use use(*this);
  const py::gil_scoped_release released;
  const OrdinaryMode mode;
  const auto& attention = dynamic_cast<const TextAttention&>(*site(index).host);
  at::Tensor result = attention.score_rows(*trace_, row_site(site(index)), rows);
  if (scores) return result;
  return ops::apart_from_graph(ops::attention_probabilities(result));
}

std::int64_t RunningTrace::count_tokens(int index) {
  const Use use(*this);
  const py::gil_scoped_release released;
  const auto& mixer = dynamic_cast<const DeltaNet&>(*site(index).host);
  return mixer.tokens(*trace_, method_site(site(index), "state_after"));
}

at::Tensor RunningTrace::state_after(int index, std::int64_t token) {
  const Use use(*this);
  const py::gil_scoped_release released;
  const OrdinaryMode mode;
  const auto& mixer = dynamic_cast<const DeltaNet&>(*site(index).host);
  return mixer.state_after(*trace_, method_site(site(index), "state_after"), token);
}

void RunningTrace::set_state_after(int index, std::int64_t token, at::Tensor state) {
  const Use use(*this);
  const py::gil_scoped_release released;
  const auto& mixer = dynamic_cast<const DeltaNet&>(*site(index).host);
  mixer.set_state_after(*trace_, method_site(site(index), "set_state_after"), token,
                        std::move(state));
}

void RunningTrace::check_replaceable(int module) const {
  trace_->check_replaceable(*model_->tree().modules().at(module));
}

void RunningTrace::replace(int module, at::Tensor value) {
  const Use use(*this);
  trace_->replace(*model_->tree().modules().at(module), std::move(value));
}

at::Tensor RunningTrace::finish() {
  const Use use(*this);
  const py::gil_scoped_release released;
  return trace_->finish();
}

std::optional<std::string> RunningTrace::site_of(const at::Tensor& tensor) const {
  const Site* site = trace_->site_of(tensor);
  return site ? std::optional(site->path) : std::nullopt;
}

const Site& RunningTrace::element(int index, int element_index) {
  const int slot = site(index).slot + element_index;
  for (const Site& known : *elements_) {
    if (known.location == site(index).location && known.slot == slot) return known;
  }
  elements_->push_back(site(index));
  elements_->back().slot = slot;
  elements_->back().path += fmt::format(".{}", element_index);
  return elements_->back();
}

std::vector<const Site*> RunningTrace::elements(int index) {
  const int count = trace_->slots(site(index)) - site(index).slot;
  std::vector<const Site*> sites;
  sites.reserve(count);
  for (int i = 0; i < count; ++i) sites.push_back(&element(index, i));
  return sites;
}

void register_trace(py::module_& module) {
  Trace::interrupt_check = check_interrupt;
  module.def("own_storage", &own_storage, py::arg("tensor"),
             "Part a tensor without a graph from the larger one that it views.");

  py::class_<RunningTrace>(module, "Trace", "One forward, advanced by its reader.")
      .def("read", &RunningTrace::read)
      .def("write", &RunningTrace::write)
      .def("read_list", &RunningTrace::read_list)
      .def("write_list", &RunningTrace::write_list)
      .def("count_queries", &RunningTrace::count_queries)
      .def(
          "attention_rows",
          [](RunningTrace& self, int site, std::vector<std::int64_t> heads,
             std::vector<std::int64_t> queries, bool scores) {
            return self.attention_rows(site, {std::move(heads), std::move(queries)}, scores);
          },
          py::arg("site"), py::arg("heads"), py::arg("queries"), py::arg("scores"))
      .def("count_tokens", &RunningTrace::count_tokens)
      .def("state_after", &RunningTrace::state_after)
      .def("set_state_after", &RunningTrace::set_state_after)
      .def("check_reachable", &RunningTrace::check_reachable)
      .def("check_replaceable", &RunningTrace::check_replaceable)
      .def("replace", &RunningTrace::replace)
      .def("finish", &RunningTrace::finish)
      .def("check_edits", &RunningTrace::check_edits)
      .def("hand_over", &RunningTrace::hand_over)
      .def("close", &RunningTrace::close)
      .def("site_of", &RunningTrace::site_of)
      .def("position", &RunningTrace::position);
}

}  // namespace vlscope
