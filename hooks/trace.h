// Trace: one forward that stops where its reader asks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <coroutine>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/flow.h"
#include "hooks/tree.h"

namespace vlscope {

class Trace;

/// What the forward awaits at a location. Ready (no suspension) unless the reader wants to stop
/// here. Resumes with true if what the forward holds was changed: assigned, edited in place, or
/// made part of a gradient graph.
template <std::size_t N>
class [[nodiscard]] Stop {
 public:
  Stop(Trace& trace, const Location& location, std::array<at::Tensor*, N> live)
      : trace_(trace), location_(location), live_(live) {}
  bool await_ready() const noexcept;
  bool await_suspend(std::coroutine_handle<> forward);
  bool await_resume();

 private:
  Trace& trace_;
  const Location& location_;
  std::array<at::Tensor*, N> live_;
  bool stopped_ = false;
};

/// One run of a forward, advanced by its reader.
///
/// The forward side (`at`, `wants`, `skip`) is called by the modules, the reader side (`read`,
/// `write`, `finish`) by whoever opened the trace. All state of a run is in here and in the
/// suspended coroutine: nothing is written to the modules, so any number of traces share a model. A
/// Trace itself belongs to one thread at a time.
class Trace {
 public:
  using Forward = std::function<Flow<at::Tensor>(Trace&)>;
  /// Called at each location of a forward that is only listed, with the tensors that it offers.
  using Visitor = std::function<void(const Location&, at::Tensor* const* live, std::size_t count)>;

  struct Options {
    std::int64_t batch = 1;           ///< Prompts in the input.
    bool images = false;              ///< The input carries images.
    bool videos = false;              ///< The input carries videos.
    bool later_step = false;          ///< A step of a generation after the prompt's.
    const Location* start = nullptr;  ///< Nothing before it is reached; nullptr is the very start.
    std::vector<at::Tensor> foreign;  ///< The caller's tensors: served as copies, never edited.
    Visitor visitor = nullptr;        ///< Visit every location and stop at none.
  };

  Trace(std::shared_ptr<const Tree> tree, Forward forward, Options options);
  ~Trace();
  Trace(const Trace&) = delete;

  /// @name The forward side
  /// @{

  /// Offers live tensors at a location: `co_await trace.at(output, x)`. The forward goes on from
  /// what is in them afterwards.
  template <class... Tensors>
  auto at(const Location& location, Tensors&... live) {
    return Stop<sizeof...(live)>(*this, location, {&live...});
  }
  /// The same for tensors whose number is only known at run time.
  auto at_all(const Location& location, std::vector<at::Tensor*> live) {
    return StopAll{*this, location, std::move(live)};
  }
  /// Offers tensors of which some are only computed when the reader asks for them. Where one of
  /// those is asked for, the forward resumes here with `asked_again` true, computes it, and offers
  /// the location once more.
  template <class... Tensors>
  auto on_demand(const Location& location, Tensors&... live) {
    on_demand_ = true;
    return Stop<sizeof...(live)>(*this, location, {&live...});
  }
  bool asked_again() { return std::exchange(asked_again_, false); }
  /// True if the reader is waiting for just this location: what is only computed on demand must be.
  bool wants(const Location& location) const { return target_ == location.order() || listing(); }
  /// True if the reader is waiting for just this tensor of this location.
  bool wants(const Location& location, int slot) const {
    return target_ == location.order() && demand_ == slot;
  }
  /// True if the reader wants nothing up to and including `location`, and has changed nothing yet:
  /// what is recorded of the forward there is what it would compute.
  bool passes_unchanged(const Location& location) const;
  /// True if the reader, as the module is about to be called, stops at nothing of it and has
  /// nothing of it skipped: its result may be computed together with what follows, or in part.
  bool passes(const Module& module) const;
  /// True if the forward is only listed: every location is visited, none is stopped at.
  bool listing() const { return options_.visitor != nullptr; }
  /// True if the reader had the module skipped.
  bool skips(const Module& module) const;
  /// If the reader had the module skipped: puts the replacement into `x` and returns true.
  bool skip(const Module& module, at::Tensor& x);
  /// Called at the start of every block, where a user's interrupt may end the run.
  void checkpoint() const {
    if (interrupt_check) interrupt_check();
  }
  /// Throws to end a run early; set by the host language. Called without its locks.
  static inline void (*interrupt_check)() = nullptr;

  /// @}
  /// @name The reader side
  /// @{

  /// The live tensor at a site, after advancing the forward to it; an undefined tensor where the
  /// reference has None. Reading a site again gives the same object.
  /// @throws Unavailable, OutOfOrderError, NotReachedError before the forward moves; LateEditError
  at::Tensor read(const Site& site);
  /// Puts `value` in place of what the forward holds at a site, after advancing to it.
  /// @throws InputError if shape, dtype or device differ; whatever `read` throws
  void write(const Site& site, at::Tensor value);
  /// Throws InputError where `write` would, for the shape, dtype or device of `value`.
  void check_value(const Site& site, const at::Tensor& value);
  /// The tensor at a site as the forward holds it, after advancing there. Not for the reader's
  /// hands: neither its aliases nor its edits are followed.
  at::Tensor peek(const Site& site);
  /// Puts a tensor where the forward offers a place for one and holds none, or another put there.
  /// What it means is between the module and its caller.
  void amend(const Site& site, const at::Tensor& value);
  /// True if reading the site needs no step of the forward.
  bool stands_at(const Site& site) const { return standing_ == site.location && !on_demand_; }
  /// Refuses what `read` would refuse before the forward moves.
  void check_reachable(const Site& site) const;
  /// The number of tensors that the location of `site` offers; advances to it.
  int slots(const Site& site);
  /// Refuses what `replace` refuses.
  /// @throws OutOfOrderError if the module was already entered beyond its input
  void check_replaceable(const Module& module) const;
  /// Replaces the call of a module by `value`: nothing inside it is computed or reached.
  /// @throws OutOfOrderError if the module was already entered beyond its input
  void replace(const Module& module, const at::Tensor& value);
  /// Runs the forward to its end. Returns what it returns.
  at::Tensor finish();
  /// Throws LateEditError if a served tensor was edited after the forward had moved on.
  void check_edits();
  /// Goes on watching what an earlier run of the same model served: its late edits are seen here,
  /// and its tensors keep their sites.
  void inherit(Trace& earlier);
  /// Drops the forward where it stands. Values already served stay valid.
  void close();

  /// Where a tensor was served by this trace; nullptr if it was not.
  const Site* site_of(const at::Tensor& tensor) const;
  /// True while the forward can still move.
  bool open() const { return !closed_; }
  /// Path of the place where the forward stands, for messages.
  std::string position() const;

  /// @}

 private:
  template <std::size_t N>
  friend class Stop;
  struct StopAll {
    Trace& trace;
    const Location& location;
    std::vector<at::Tensor*> live;
    bool stopped = false;
    bool await_ready() const noexcept { return location.order() < trace.target_; }
    bool await_suspend(std::coroutine_handle<> forward) {
      return stopped = trace.arrive(location, live.data(), live.size(), forward);
    }
    bool await_resume() { return stopped && trace.depart(); }
  };

  /// A tensor handed to the reader at the location where the forward stands.
  struct Served {
    int slot;
    View view;
    at::Tensor tensor;
    std::uint32_t version;
    const Site* site;
  };
  /// What is remembered of a served tensor after the forward has left it: enough to notice a late
  /// edit, and nothing that keeps its memory.
  struct Note {
    c10::VariableVersion counter;
    std::uint32_t version;
    const void* storage;
    const Site* site;
    int step;  ///< Of the generation, in which it was served.
  };
  struct Record {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    const Site* site;
  };
  struct Skip {
    const Module* module;
    at::Tensor value;
  };

  bool arrive(const Location& location, at::Tensor* const* live, std::size_t count,
              std::coroutine_handle<> forward);
  bool depart();
  void advance(const Site& site);
  void resume();
  void check_given(const Site& site) const;
  at::Tensor& live(const Site& site);
  at::Tensor serve(const Site& site);
  at::Tensor through(View view, const at::Tensor& tensor) const;
  bool edited() const;
  void remember(const Site& site, const at::Tensor& tensor);
  bool is_foreign(const at::Tensor& tensor) const;
  bool stands_on(const void* storage) const;

  std::shared_ptr<const Tree> tree_;
  Options options_;
  Forward forward_;
  Flow<at::Tensor> flow_;
  std::coroutine_handle<> waiting_;  ///< The innermost suspended call.

  int step_ = 0;    ///< Of the generation that this run is part of; 0 without one.
  int target_ = 0;  ///< Order of the location to stop at.
  int demand_ = 0;  ///< Slot that the reader wants there.
  const Location* standing_ = nullptr;
  at::Tensor* const* live_ = nullptr;
  std::size_t live_count_ = 0;
  std::vector<Served> served_;
  bool assigned_ = false;
  bool changed_ = false;  ///< At any location so far.
  bool on_demand_ = false;
  bool asked_again_ = false;
  bool closed_ = false;
  at::Tensor result_;
  std::string failure_;

  std::vector<Note> notes_;
  std::vector<Record> records_;
  std::vector<Skip> skips_;
};

template <std::size_t N>
bool Stop<N>::await_ready() const noexcept {
  return location_.order() < trace_.target_;
}
template <std::size_t N>
bool Stop<N>::await_suspend(std::coroutine_handle<> forward) {
  return stopped_ = trace_.arrive(location_, live_.data(), N, forward);
}
template <std::size_t N>
bool Stop<N>::await_resume() {
  return stopped_ && trace_.depart();
}

}  // namespace vlscope
