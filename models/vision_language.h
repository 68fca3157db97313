// What the families have in common around their tower and their text model.
#pragma once

#include <memory>
#include <string>

#include "models/causal_lm.h"
#include "models/text/model.h"
#include "models/vision/tower.h"

namespace vlscope {

/// A family, in its parts.
struct FamilyParts {
  std::unique_ptr<VisionTower> (*tower)(Module* parent, std::string name,
                                        const VisionConfig& config, bool eager);
  TextParts text;
};

template <class Tower>
std::unique_ptr<VisionTower> build_tower(Module* parent, std::string name,
                                         const VisionConfig& config, bool eager) {
  return std::make_unique<Tower>(parent, std::move(name), config, eager);
}

/// The tower and the text model.
class MultimodalModel : public Module {
 public:
  MultimodalModel(Module* parent, std::string name, const Config& config, const FamilyParts& parts,
                  bool eager);

  std::unique_ptr<VisionTower> visual;
  TextModel language_model;
};

/// Embeds the prompt, puts what the tower sees at its image and video tokens, and runs the text
/// model on it.
class VisionLanguageModel : public CausalLM {
 public:
  VisionLanguageModel(const Config& config, Attention attention, const FamilyParts& parts);

  const Location& tail_start() const override { return model.language_model.input; }

  MultimodalModel model;

 protected:
  Flow<at::Tensor> hidden_states(Trace& trace, Inputs& inputs) const override;
  const Leaf& final_norm() const override { return *model.language_model.norm; }

 private:
  /// The prompt's embeddings, with what the tower sees among them.
  Flow<TextModel::Input> embed(Trace& trace, Inputs& inputs) const;
  /// Runs the tower on images and videos, scatters its features among the embeddings of `in`, and
  /// puts the DeepStack levels there.
  Flow<TextModel::Input> see(Trace& trace, const Inputs& inputs, const VisualTokens& visual,
                             TextModel::Input in) const;
};

}  // namespace vlscope
