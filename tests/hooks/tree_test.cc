#include "hooks/tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/hooks/message_of.h"

namespace vlscope {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Kind kRoot{"Root", "", {{"x"}}, Form::kTensor, {{"x"}}, {}, {{"eye", "model.visual"}}};
const Kind kBlock{"Block",
                  "",
                  {{"x"}, {"positions", true, 2, /*read_only=*/true}},
                  Form::kTensor,
                  {{"x"}},
                  {{"block_output", "Residual", "", "", "output"},
                   {"proj_output", "Residual", "", "", "proj.output"}}};
/// With the name of the tower, by which a load without images knows what to withhold.
const Kind kVisual{"Vision", "", {{"x"}}, Form::kTensor, {{"x"}}};

class Block : public Module {
 public:
  Block(Module* parent, std::string name) : Module(parent, std::move(name), kBlock) {
    declare("weight", {2, 3}, weight_);
  }
  struct Proj : Module {
    explicit Proj(Module* parent) : Module(parent, "proj", kinds::linear) {}
  } proj{this};

 private:
  at::Tensor weight_;
};

struct Visual : Module {
  explicit Visual(Module* parent) : Module(parent, "visual", kVisual) {}
  Block block{this, "blocks.0"};
};

struct Model : Module {
  explicit Model(Module* parent) : Module(parent, "model", kRoot) {}
  Visual visual{this};
};

struct Root : Module {
  Root() : Module(nullptr, "", kRoot) {}
  Model model{this};
};

TEST(Module, IsNamedByItsNativePathAndByTheShortOne) {
  const Root root;
  EXPECT_EQ(root.model.visual.block.proj.path(), "model.visual.blocks.0.proj");
  EXPECT_EQ(root.model.visual.block.proj.site_path(), "eye.blocks.0.proj");
  EXPECT_EQ(root.model.visual.block.output.path(), "eye.blocks.0.output");
  EXPECT_EQ(root.output.path(), "output");
}

TEST(Module, FindsItsLocationsAndThoseBelow) {
  const Root root;
  const Block& block = root.model.visual.block;
  EXPECT_EQ(block.find_location("output"), &block.output);
  EXPECT_EQ(block.find_location("proj.output"), &block.proj.output);
  EXPECT_EQ(root.find_location("model.visual.blocks.0.proj.input"), &block.proj.input);
  EXPECT_EQ(block.find_location("pro.output"), nullptr);
  EXPECT_EQ(block.find_location("proj"), nullptr);
}

TEST(Module, DeclaresItsParametersWithNameAndShape) {
  const Root root;
  const auto& parameters = root.model.visual.block.parameters();
  ASSERT_EQ(parameters.size(), 1u);
  EXPECT_EQ(parameters[0].name, "weight");
  EXPECT_THAT(parameters[0].shape, ElementsAre(2, 3));
}

TEST(Tree, ListsParentsBeforeChildren) {
  Root root;
  const Tree tree(root);
  std::vector<std::string> paths;
  for (const Module* module : tree.modules()) paths.push_back(module->path());
  EXPECT_THAT(paths, ElementsAre("", "model", "model.visual", "model.visual.blocks.0",
                                 "model.visual.blocks.0.proj"));
}

TEST(Tree, HasASiteForEveryInputOutputAndValueOfAModule) {
  Root root;
  const Tree tree(root);
  const Block& block = root.model.visual.block;
  std::vector<std::string> paths;
  for (const Site& site : tree.sites()) {
    if (site.host == &block) paths.push_back(site.path);
  }
  EXPECT_THAT(paths, ElementsAre("eye.blocks.0.input", "eye.blocks.0.input", "eye.blocks.0.input",
                                 "eye.blocks.0.output", "eye.blocks.0.block_output",
                                 "eye.blocks.0.proj_output"));
  const Site& positions = tree.sites()[tree.first_input(block) + 2];
  EXPECT_EQ(positions.slot, 2);
  EXPECT_EQ(positions.view, View::kCopy);
  EXPECT_THAT(positions.read_only, HasSubstr("positions"));
  EXPECT_EQ(tree.sites()[tree.first_value(block) + 1].location, &block.proj.output);
}

TEST(Tree, WithholdsWhatIsNotServedForTheReasonGiven) {
  Root root;
  root.model.visual.block.set_unavailable("block_output", "it is not computed");
  const Tree tree(root);
  const int first = tree.first_value(root.model.visual.block);
  EXPECT_EQ(tree.sites()[first].unavailable, "it is not computed");
  EXPECT_EQ(tree.sites()[first + 1].unavailable, "");
}

TEST(Tree, WithholdsTheTowerAndWhatIsVisualFromALoadWithoutImages) {
  Root root;
  Tree tree(root);
  const Block& block = root.model.visual.block;
  tree.number({&root.input, &root.output}, {&root.input, &block.output, &root.output});
  tree.forbid_visual("no processor");
  EXPECT_EQ(tree.sites()[tree.first_input(root)].unavailable, "");
  EXPECT_EQ(tree.sites()[tree.first_input(root.model.visual)].unavailable, "no processor");
  EXPECT_EQ(tree.sites()[tree.first_output(block)].unavailable, "no processor");
}

TEST(Tree, NumbersInTheOrderOfAnImageAndMarksWhatATextLeavesOut) {
  Root root;
  Tree tree(root);
  const Block& block = root.model.visual.block;
  EXPECT_EQ(root.input.order(), Location::kUnordered);
  tree.number({&root.input, &root.output}, {&root.input, &block.output, &root.output});
  EXPECT_THAT(tree.order(), ElementsAre(&root.input, &block.output, &root.output));
  EXPECT_EQ(block.output.order(), 1);
  EXPECT_TRUE(block.output.visual());
  EXPECT_FALSE(root.output.visual());
}

TEST(Tree, RefusesALocationVisitedTwiceNamingIt) {
  Root root;
  Tree tree(root);
  const Location* output = &root.model.visual.block.output;
  EXPECT_THAT(message_of<std::logic_error>([&] { tree.number({}, {output, &root.input, output}); }),
              HasSubstr("the forward visits eye.blocks.0.output twice"));
}

TEST(Tree, RefusesATextWhoseOrderIsNotThatOfAnImage) {
  Root root, other;
  EXPECT_THROW(Tree(root).number({&root.output, &root.input}, {&root.input, &root.output}),
               std::logic_error);
  EXPECT_THROW(Tree(other).number({&other.output, &other.output}, {&other.input, &other.output}),
               std::logic_error)
      << "a text visits a location twice";
}

}  // namespace
}  // namespace vlscope
