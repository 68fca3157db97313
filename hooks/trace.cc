#include "hooks/trace.h"

#include <ATen/ops/clone.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/errors.h"
#include "core/ordinary_mode.h"
#include "core/text.h"

namespace vlscope {
namespace {

constexpr int kNowhere = std::numeric_limits<int>::min();
constexpr int kEnd = std::numeric_limits<int>::max();

/// True if what is served is a view with another shape than the tensor that the forward holds.
bool reshapes(View view) { return view == View::kImagesAxis || view == View::kBatchAxis; }

/// The tensor that the forward goes on with when `value` was served through `view`.
at::Tensor back_from(View view, const at::Tensor& value) {
  switch (view) {
    case View::kImagesAxis:
      return value.squeeze(0);
    case View::kBatchAxis:
      return value.flatten(0, 1);
    case View::kCopy:
    case View::kWhole:
      break;
  }
  return value;
}

/// A tensor made in inference mode has no version counter, which everything served must have.
at::Tensor ordinary(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_inference() ? tensor.clone() : tensor;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

void check_fits(const Site& site, const at::Tensor& value, const at::Tensor& current) {
  if (!current.defined()) {
    throw InputError(fmt::format("{} is None here and cannot be assigned.", site.path));
  }
  const bool fits = value.defined() && value.sizes() == current.sizes() &&
                    value.scalar_type() == current.scalar_type() &&
                    value.device() == current.device() && value.layout() == current.layout();
  if (fits) return;
  throw InputError(fmt::format(
      "{} holds {}; the value assigned is {}. Give a tensor of the same shape, dtype and "
      "device, or edit in place ({}[:] = ...), which broadcasts and converts.",
      site.path, tensor_text(current), value.defined() ? tensor_text(value) : "None", site.path));
}

void check_replacement(const Module& module, const at::Tensor& value, const at::Tensor& output) {
  if (value.sizes() == output.sizes() && value.scalar_type() == output.scalar_type() &&
      value.device() == output.device()) {
    return;
  }
  throw InputError(fmt::format("{} is skipped with {}, but what leaves it is {}.",
                               module.site_path(), tensor_text(value), tensor_text(output)));
}

}  // namespace

Trace::Trace(std::shared_ptr<const Tree> tree, Forward forward, Options options)
    : tree_(std::move(tree)),
      options_(std::move(options)),
      forward_(std::move(forward)),
      flow_(forward_(*this)),
      waiting_(flow_.handle()) {
  if (listing()) target_ = kNowhere;
}

Trace::~Trace() { close(); }

void Trace::close() {
  closed_ = true;
  flow_ = {};
  waiting_ = nullptr;
  standing_ = nullptr;
  served_.clear();
  notes_.clear();
  records_.clear();
  skips_.clear();
  options_.foreign.clear();
  result_ = at::Tensor();
}

// --- The forward side ---------------------------------------------------------------------------

bool Trace::arrive(const Location& location, at::Tensor* const* live, std::size_t count,
                   std::coroutine_handle<> forward) {
  if (listing()) {
    options_.visitor(location, live, count);
    return false;
  }
  standing_ = &location;
  live_ = live;
  live_count_ = count;
  waiting_ = forward;
  return true;
}

bool Trace::edited() const {
  if (assigned_) return true;
  for (const Served& served : served_) {
    if (served.tensor._version() != served.version || served.tensor.requires_grad()) return true;
  }
  return false;
}

bool Trace::depart() {
  const bool changed = edited();
  for (const Served& served : served_) {
    // The reader may have made the object in hand part of a graph; going on from the tensor that it
    // was made of would leave that graph behind.
    at::Tensor& held = *live_[served.slot];
    const bool own_graph =
        served.tensor.requires_grad() && (!held.requires_grad() || served.tensor.grad_fn());
    // Flattening what was assigned may have taken a copy, which edits in place do not reach.
    const bool copied = storage_of(held) != storage_of(served.tensor);
    if (reshapes(served.view) && (own_graph || copied)) {
      held = back_from(served.view, served.tensor);
    }
    notes_.push_back({served.tensor.unsafeGetTensorImpl()->version_counter(),
                      static_cast<std::uint32_t>(served.tensor._version()),
                      storage_of(served.tensor), served.site, step_});
  }
  served_.clear();
  changed_ |= changed;
  assigned_ = false;
  on_demand_ = false;
  standing_ = nullptr;
  return changed;
}

bool Trace::passes_unchanged(const Location& location) const {
  if (changed_ || target_ <= location.order()) return false;
  return std::none_of(skips_.begin(), skips_.end(), [&](const Skip& skip) {
    return skip.module->input.order() < location.order();
  });
}

bool Trace::passes(const Module& module) const {
  if (listing() || target_ <= module.output.order()) return false;
  return std::none_of(skips_.begin(), skips_.end(), [&](const Skip& skip) {
    const Module* inner = skip.module;
    while (inner && inner != &module) inner = inner->parent();
    return inner != nullptr;
  });
}

bool Trace::skips(const Module& module) const {
  return std::any_of(skips_.begin(), skips_.end(),
                     [&](const Skip& skip) { return skip.module == &module; });
}

bool Trace::skip(const Module& module, at::Tensor& x) {
  for (const Skip& skip : skips_) {
    if (skip.module != &module) continue;
    check_replacement(module, skip.value, module.output_like(x));
    x = skip.value;
    return true;
  }
  return false;
}

// --- The reader side ----------------------------------------------------------------------------

at::Tensor Trace::read(const Site& site) {
  advance(site);
  return serve(site);
}

int Trace::slots(const Site& site) {
  advance(site);
  return static_cast<int>(live_count_);
}

void Trace::write(const Site& site, at::Tensor value) {
  if (!site.read_only.empty())
    throw InputError(site.path + " is read-only: " + site.read_only + ".");
  advance(site);
  const OrdinaryMode mode;
  const at::Tensor current = serve(site);
  if (value.defined() && value.is_same(current)) return;
  const bool native = current.defined() && value.defined() && value.sizes() == live(site).sizes();
  if (reshapes(site.view) && native) {
    value = through(site.view, value);  // The native form, without the axis.
  }
  check_fits(site, value, current);
  value = ordinary(value);
  *live_[site.slot] = back_from(site.view, value);
  std::erase_if(served_, [&](const Served& served) { return served.slot == site.slot; });
  remember(site, value);
  assigned_ = true;
}

void Trace::check_value(const Site& site, const at::Tensor& value) {
  check_fits(site, value, read(site));
}

at::Tensor Trace::peek(const Site& site) {
  advance(site);
  return live(site);
}

void Trace::amend(const Site& site, const at::Tensor& value) {
  advance(site);
  const OrdinaryMode mode;
  live(site) = ordinary(value);
  assigned_ = true;
}

void Trace::check_replaceable(const Module& module) const {
  const int entry = module.input.order();
  const bool inside = standing_ ? standing_->order() > entry : target_ > entry;
  if (inside) {
    throw OutOfOrderError(fmt::format(
        "{0} cannot be skipped: the forward already stands at {1}. Skip it before reading anything "
        "inside or behind it.",
        module.site_path(), position()));
  }
}

void Trace::replace(const Module& module, const at::Tensor& value) {
  check_edits();
  check_replaceable(module);
  const OrdinaryMode mode;
  skips_.push_back({&module, ordinary(value)});
}

at::Tensor Trace::finish() {
  check_edits();
  if (!failure_.empty()) throw OutOfOrderError(failure_);
  if (flow_.done()) return result_;
  if (!listing()) target_ = kEnd;
  resume();
  return result_;
}

void Trace::advance(const Site& site) {
  if (!site.unavailable.empty()) {
    throw Unavailable(fmt::format("{} is unavailable: {}", site.path, site.unavailable));
  }
  if (closed_) throw OutOfOrderError(site.path + " was asked for after its trace had ended.");
  check_edits();
  if (standing_ == site.location) return check_given(site);
  check_reachable(site);
  target_ = site.location->order();
  demand_ = site.slot;
  resume();
  if (standing_ != site.location) {
    throw NotReachedError(fmt::format("{} is not reached by this forward, which went on to {}.",
                                      site.path, position()));
  }
}

/// What the prompt lacks is known from the start.
void Trace::check_given(const Site& site) const {
  if (options_.start && site.location->order() < options_.start->order()) {
    throw NotReachedError(
        fmt::format("{} is not reached: the tail of a recording begins at {}, with what was "
                    "recorded of all before.",
                    site.path, options_.start->path()));
  }
  const auto refuse = [&](const char* what, const char* give) {
    if (options_.later_step) {
      throw NotReachedError(fmt::format(
          "{} is not reached: what a generation sees, it sees on its prompt step (step 0).",
          site.path));
    }
    throw NotReachedError(
        fmt::format("{} is not reached: there is no {} in this prompt. Give {} to the trace.",
                    site.path, what, give));
  };
  if (site.needs == Needs::kVideo && !options_.videos) refuse("video", "videos=[...]");
  if (site.needs == Needs::kImage && !options_.images) refuse("image", "images=[...]");
  if (site.location->visual() && !options_.images && !options_.videos) {
    refuse("image or video", "images=[...] or videos=[...]");
  }
}

void Trace::check_reachable(const Site& site) const {
  check_given(site);
  if (!failure_.empty()) throw OutOfOrderError(failure_);
  const int asked = site.location->order();
  for (const Skip& skip : skips_) {
    if (skip.module->input.order() < asked && asked < skip.module->output.order()) {
      throw NotReachedError(fmt::format("{} is not reached: {} is skipped in this trace.",
                                        site.path, skip.module->site_path()));
    }
  }
  const int here = flow_.done() ? kEnd : standing_ ? standing_->order() : target_;
  if (asked >= here) return;
  throw OutOfOrderError(
      fmt::format("{0} was asked for, but the forward already stands at {1}, which comes later. "
                  "Read {0} before "
                  "{1}, or open another trace.",
                  site.path, position()));
}

void Trace::resume() {
  const OrdinaryMode mode;
  std::coroutine_handle<> forward = std::exchange(waiting_, nullptr);
  forward.resume();
  if (!flow_.done()) return;
  standing_ = nullptr;
  target_ = kEnd;
  failure_ = "the forward of this trace has failed: open another trace.";
  result_ = flow_.result();  // Throws what the forward threw.
  failure_.clear();
}

at::Tensor& Trace::live(const Site& site) {
  if (site.slot >= static_cast<int>(live_count_)) {
    throw NotReachedError(
        fmt::format("{} has {} tensors here, and none at {}.", site.path, live_count_, site.slot));
  }
  at::Tensor& held = *live_[site.slot];
  if (!on_demand_ || (held.defined() && !edited())) return held;
  asked_again_ = true;
  demand_ = site.slot;
  resume();
  return *live_[site.slot];
}

at::Tensor Trace::through(View view, const at::Tensor& tensor) const {
  switch (view) {
    case View::kImagesAxis:
      return tensor.unsqueeze(0);
    case View::kBatchAxis:
      return tensor.unflatten(0, {options_.batch, -1});
    case View::kCopy:
      return tensor.clone();
    case View::kWhole:
      break;
  }
  return tensor;
}

at::Tensor Trace::serve(const Site& site) {
  at::Tensor& held = live(site);
  if (!held.defined()) return held;
  for (const Served& served : served_) {
    if (served.slot == site.slot && served.view == site.view) return served.tensor;
  }
  const OrdinaryMode mode;
  if (is_foreign(held)) held = held.clone();
  at::Tensor value = through(site.view, held);
  remember(site, value);
  return value;
}

void Trace::remember(const Site& site, const at::Tensor& tensor) {
  if (site.view != View::kCopy) {
    served_.push_back(
        {site.slot, site.view, tensor, static_cast<std::uint32_t>(tensor._version()), &site});
  }
  records_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()), &site});
}

bool Trace::is_foreign(const at::Tensor& tensor) const {
  for (const at::Tensor& foreign : options_.foreign) {
    if (foreign.defined() && storage_of(foreign) == storage_of(tensor)) return true;
  }
  return false;
}

bool Trace::stands_on(const void* storage) const {
  for (std::size_t i = 0; standing_ && i < live_count_; ++i) {
    if (live_[i]->defined() && storage_of(*live_[i]) == storage) return true;
  }
  return false;
}

void Trace::check_edits() {
  // Nobody can edit what nobody holds any more.
  std::erase_if(notes_, [](const Note& note) { return note.counter.unique(); });
  for (Note& note : notes_) {
    const std::uint32_t version = note.counter.current_version();
    if (version == note.version) continue;
    if (!stands_on(note.storage)) {
      if (note.step != step_) {
        throw LateEditError(fmt::format(
            "{0} of step {1} was edited after the generation had moved on to step {2}, {3}: "
            "the tokens in between were chosen with the old value. Edit {0} within its step, "
            "before reading anything behind it.",
            note.site->path, note.step, step_, position()));
      }
      throw LateEditError(
          fmt::format("{0} was edited after the forward had moved on to {1}: part of the model has "
                      "already used "
                      "the old value. Edit {0} before reading anything behind it.",
                      note.site->path, position()));
    }
    note.version = version;
  }
}

void Trace::inherit(Trace& earlier) {
  step_ = earlier.step_ + 1;
  notes_ = std::move(earlier.notes_);
  records_ = std::move(earlier.records_);
  std::erase_if(records_, [](const Record& record) { return record.tensor.expired(); });
}

const Site* Trace::site_of(const at::Tensor& tensor) const {
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
    if (record->tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl()) return record->site;
  }
  return nullptr;
}

std::string Trace::position() const {
  if (!served_.empty()) return served_.back().site->path;
  if (standing_) return standing_->path();
  if (flow_.done() || target_ == kEnd) {
    return step_ > 0 ? fmt::format("the end of step {} of its generation", step_) : "its end";
  }
  return "its start";
}

}  // namespace vlscope
