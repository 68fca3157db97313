// A trace as Python holds it: sites by number, the model kept alive, the GIL left while it runs.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "models/model.h"

namespace vlscope {

class RunningTrace {
 public:
  RunningTrace(std::shared_ptr<Model> model, std::unique_ptr<Trace> trace)
      : model_(std::move(model)), trace_(std::move(trace)) {}

  at::Tensor read(int site);
  /// The element `index` of the list that starts at `site`.
  at::Tensor read_element(int site, int index);
  void write(int site, at::Tensor value);
  void write_element(int site, int index, at::Tensor value);
  /// Tensors offered at the site's location, from the site's slot on.
  int count_from(int site);
  void replace(int module, at::Tensor value);
  at::Tensor finish();
  void check_edits() { trace_->check_edits(); }
  void close() { trace_->close(); }
  std::optional<std::string> site_of(const at::Tensor& tensor) const;
  std::string position() const { return trace_->position(); }

 private:
  const Site& site(int index) const { return model_->tree().sites().at(index); }
  const Site& element(int site, int index);

  std::shared_ptr<Model> model_;
  std::unique_ptr<Trace> trace_;
  std::deque<Site> elements_;  ///< Sites of list elements; addresses must stay.
};

}  // namespace vlscope
