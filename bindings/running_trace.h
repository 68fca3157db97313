// A trace as Python holds it: sites by number, the model kept alive, the GIL left while it runs.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/ops/attention.h"
#include "models/model.h"

namespace vlscope {

class RunningTrace {
 public:
  RunningTrace(std::shared_ptr<Model> model, std::unique_ptr<Trace> trace)
      : model_(std::move(model)), trace_(std::move(trace)) {}

  at::Tensor read(int site);
  void write(int site, at::Tensor value);
  /// Place of a site in the forward order; -1 if it is never served.
  int order(int site) const;
  void check_reachable(int site) const { trace_->check_reachable(this->site(site)); }
  /// False if the site is never assigned, or never served.
  bool writable(int site) const;
  /// The list that starts at `site`: every tensor that its location offers from there on.
  std::vector<at::Tensor> read_list(int site);
  /// Writes all of a list, or nothing if a value does not fit.
  void write_list(int site, const std::vector<at::Tensor>& values);
  /// Queries of a text attention, after advancing to them. `site` is its attention_queries.
  std::int64_t count_queries(int site);
  /// Rows of its probabilities, or of its scores.
  at::Tensor attention_rows(int site, const ops::RowChoice& rows, bool scores);
  /// Tokens of a linear attention, after advancing to its recurrence. `site` is its `state`.
  std::int64_t count_tokens(int site);
  at::Tensor state_after(int site, std::int64_t token);
  void set_state_after(int site, std::int64_t token, at::Tensor state);
  void check_replaceable(int module) const;
  void replace(int module, at::Tensor value);
  at::Tensor finish();
  void check_edits();
  /// Ends this trace in favour of the next step of the same generation.
  void hand_over(RunningTrace& next);
  /// Waits for a thread that is still inside.
  void close();
  std::optional<std::string> site_of(const at::Tensor& tensor) const;
  std::string position() const { return trace_->position(); }

 private:
  const Site& site(int index) const { return model_->tree().sites().at(index); }
  const Site& element(int site, int index);
  std::vector<const Site*> elements(int site);

  /// Held while the trace is used. A second thread, or a signal handler of the first, is refused:
  /// the forward is suspended in one place only.
  class Use {
   public:
    explicit Use(RunningTrace& trace);
    ~Use() { trace_.user_.store(std::thread::id()); }
    Use(const Use&) = delete;

   private:
    RunningTrace& trace_;
  };

  std::shared_ptr<Model> model_;
  std::unique_ptr<Trace> trace_;
  std::atomic<std::thread::id> user_{std::thread::id()};
  /// Sites of list elements; addresses must stay, also for the steps that follow.
  std::shared_ptr<std::deque<Site>> elements_ = std::make_shared<std::deque<Site>>();
};

}  // namespace vlscope
