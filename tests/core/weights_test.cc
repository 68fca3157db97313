#include "core/weights.h"

#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "core/errors.h"
#include "tests/core/checkpoint_files.h"

namespace vlscope {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kEmbed = "model.language_model.embed_tokens.weight";
const std::string kNorm = "model.language_model.norm.weight";
const std::string kPositions = "model.visual.pos_embed.weight";
const std::string kHead = "lm_head.weight";

/// A model of four weights, as a module tree would declare it.
struct Toy {
  explicit Toy(bool tied)
      : specs{{kEmbed, {2, 2}, &embed},
              {kNorm, {2}, &norm},
              {kPositions, {3, 1}, &positions},
              {kHead, {2, 2}, &head, tied ? kEmbed : ""}} {}

  LoadReport load(const std::vector<FileTensor>& stored, const LoadOptions& options = {}) {
    const TempFolder folder;
    folder.write("model.safetensors", safetensors_file(stored));
    return load_weights(specs, Checkpoint::open(folder.path()), options);
  }

  std::string refusal(const std::vector<FileTensor>& stored) {
    const std::string message = message_of<CheckpointError>([&] { load(stored); });
    EXPECT_FALSE(embed.defined() || norm.defined() || positions.defined() || head.defined())
        << "a refused load must leave every slot as it was";
    return message;
  }

  at::Tensor embed, norm, positions, head;
  std::vector<WeightSpec> specs;
};

/// All four weights, under the names given.
std::vector<FileTensor> stored_as(const std::string& text, const std::string& visual,
                                  const std::string& head = kHead) {
  return {f32(text + "embed_tokens.weight", {2, 2}, {1, 2, 3, 4}),
          f32(text + "norm.weight", {2}, {5, 6}),
          f32(visual + "pos_embed.weight", {3, 1}, {7, 8, 9}), f32(head, {2, 2}, {10, 11, 12, 13})};
}

std::vector<FileTensor> stored() { return stored_as("model.language_model.", "model.visual."); }

std::vector<FileTensor> stored_without(const std::string& name) {
  auto tensors = stored();
  std::erase_if(tensors, [&](const FileTensor& tensor) { return tensor.name == name; });
  return tensors;
}

/// `stored()` with the norm replaced.
std::vector<FileTensor> stored_with_norm(const FileTensor& norm) {
  auto tensors = stored();
  tensors[1] = norm;
  return tensors;
}

std::vector<float> floats(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kFloat).contiguous();
  return {wide.const_data_ptr<float>(), wide.const_data_ptr<float>() + wide.numel()};
}

TEST(CanonicalWeightName, MapsEverySpellingToTheModulePathAndIsIdempotent) {
  const std::vector<std::pair<std::string, std::string>> names = {
      {"visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"},
      {"model.visual.merger.norm.bias", "model.visual.merger.norm.bias"},
      {"model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"},
      {"model.embed_tokens.weight", kEmbed},
      {"model.norm.weight", kNorm},
      {"language_model.norm.weight", kNorm},
      {"norm.weight", kNorm},
      {kHead, kHead},
      {"mtp.norm.weight", "mtp.norm.weight"},
      {"modelling.visual.x", "modelling.visual.x"},
  };
  for (const auto& [name, canonical] : names) {
    EXPECT_EQ(canonical_weight_name(name), canonical);
    EXPECT_EQ(canonical_weight_name(canonical), canonical);
  }
}

TEST(CountWeights, LeavesTiedWeightsOut) {
  const WeightCount untied = count_weights(Toy(false).specs);
  EXPECT_EQ(untied.tensors, 4);
  EXPECT_EQ(untied.parameters, 13);
  const WeightCount tied = count_weights(Toy(true).specs);
  EXPECT_EQ(tied.tensors, 3);
  EXPECT_EQ(tied.parameters, 9);
}

TEST(LoadWeights, FillsEverySlotFromAnyPrefixes) {
  const std::vector<std::array<std::string, 2>> prefixes = {
      {"model.language_model.", "model.visual."},
      {"model.", "visual."},
      {"language_model.", "visual."},
      {"model.language_model.", "visual."}};
  for (const auto& [text, visual] : prefixes) {
    Toy toy(false);
    const LoadReport report = toy.load(stored_as(text, visual));
    EXPECT_THAT(floats(toy.embed), ElementsAre(1, 2, 3, 4));
    EXPECT_THAT(floats(toy.norm), ElementsAre(5, 6));
    EXPECT_THAT(floats(toy.positions), ElementsAre(7, 8, 9));
    EXPECT_THAT(floats(toy.head), ElementsAre(10, 11, 12, 13));
    EXPECT_THAT(report.ignored, IsEmpty());
    EXPECT_THAT(report.converted, IsEmpty());
    EXPECT_THAT(report.tied, IsEmpty());
  }
}

TEST(LoadWeights, UsesStoredBytesInPlaceAndCopiesThemWhenAsked) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file(stored()));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  Toy toy(false);
  load_weights(toy.specs, checkpoint);
  EXPECT_EQ(toy.norm.data_ptr(), checkpoint.tensor(kNorm).data_ptr());
  EXPECT_FALSE(toy.norm.requires_grad());
  LoadOptions copying;
  copying.copy = true;
  load_weights(toy.specs, checkpoint, copying);
  EXPECT_NE(toy.norm.data_ptr(), checkpoint.tensor(kNorm).data_ptr());
  EXPECT_THAT(floats(toy.norm), ElementsAre(5, 6));
}

TEST(LoadWeights, RefusesAFileThatWasWrittenToSinceItWasOpened) {
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file(stored()));
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  set_age(folder.path() / "model.safetensors", std::chrono::hours(1));
  for (const bool copy : {false, true}) {
    Toy toy(false);
    EXPECT_THAT(
        message_of<CheckpointError>([&] { load_weights(toy.specs, checkpoint, {.copy = copy}); }),
        HasSubstr("model.safetensors: "));
    EXPECT_FALSE(toy.embed.defined());
  }
}

TEST(LoadWeights, GivesWeightsAVersionCounterUnderInferenceMode) {
  const c10::InferenceMode mode;
  Toy toy(false);
  toy.load(stored());
  EXPECT_FALSE(toy.embed.is_inference());
}

TEST(LoadWeights, TiesAHeadThatIsNotStoredToTheStorageOfTheEmbedding) {
  Toy toy(true);
  const LoadReport report = toy.load(stored_without(kHead));
  EXPECT_TRUE(toy.head.is_alias_of(toy.embed));
  EXPECT_THAT(report.tied, ElementsAre(kHead));
}

TEST(LoadWeights, PrefersAStoredHeadToATie) {
  Toy toy(true);
  const LoadReport report = toy.load(stored());
  EXPECT_THAT(floats(toy.head), ElementsAre(10, 11, 12, 13));
  EXPECT_THAT(report.tied, IsEmpty());
}

TEST(LoadWeights, RefusesAMissingWeightNamingItAndTheCounts) {
  EXPECT_THAT(Toy(false).refusal(stored_without(kHead)),
              AllOf(HasSubstr(kHead), HasSubstr("[2, 2]"), HasSubstr("1 of the model's 4")));
  EXPECT_THAT(Toy(true).refusal(stored_without(kNorm)), HasSubstr(kNorm));
  EXPECT_THAT(Toy(true).refusal(stored_without(kEmbed)), HasSubstr(kEmbed));
}

TEST(LoadWeights, RefusesAWrongShapeNamingBoth) {
  EXPECT_THAT(Toy(false).refusal(stored_with_norm(f32(kNorm, {3}, {1, 2, 3}))),
              AllOf(HasSubstr(kNorm), HasSubstr("[3]"), HasSubstr("[2]")));
  EXPECT_THAT(Toy(false).refusal(stored_with_norm(f32(kNorm, {2, 1}, {1, 2}))),
              HasSubstr("[2, 1]"));
}

TEST(LoadWeights, ReportsTensorsOfNoUseInTheOrderOfTheFile) {
  auto tensors = stored();
  tensors.push_back(f32("foo.bar", {1}, {0}));
  tensors.push_back(f32("model.rotary_emb.inv_freq", {1}, {0}));
  EXPECT_THAT(Toy(false).load(tensors).ignored,
              ElementsAre("foo.bar", "model.rotary_emb.inv_freq"));
}

TEST(LoadWeights, RefusesTwoStoredNamesForOneWeight) {
  auto tensors = stored();
  tensors.push_back(f32("model.norm.weight", {2}, {0, 0}));
  EXPECT_THAT(Toy(false).refusal(tensors),
              AllOf(HasSubstr("\"model.norm.weight\""), HasSubstr("\"" + kNorm + "\"")));
}

TEST(LoadWeights, RefusesAWrapperPrefixNamingAFirstNameAndAnExpectedOne) {
  EXPECT_THAT(Toy(false).refusal(stored_as("module.model.", "module.visual.", "module.lm_head.w")),
              AllOf(HasSubstr("\"module.model.embed_tokens.weight\""), HasSubstr(kEmbed),
                    HasSubstr("4 stored")));
}

TEST(LoadWeights, RefusesWeightsInDtypesThatAreNotFloatingPointOfSixteenOrThirtyTwoBits) {
  const std::vector<std::pair<std::string, std::size_t>> dtypes = {
      {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U8", 1}, {"I8", 1}, {"I32", 4}, {"F64", 8}, {"BOOL", 1}};
  for (const auto& [dtype, width] : dtypes) {
    EXPECT_THAT(
        Toy(false).refusal(stored_with_norm({kNorm, dtype, {2}, std::string(2 * width, '\0')})),
        AllOf(HasSubstr(kNorm), HasSubstr(dtype)));
  }
}

TEST(LoadWeights, NamesThePackedDtypeBeforeTheHalvedShape) {
  EXPECT_THAT(Toy(false).refusal(stored_with_norm({kNorm, "U8", {1}, "a"})), HasSubstr("U8"));
}

TEST(LoadWeights, RefusesTheScalesOfAQuantisation) {
  for (const std::string name :
       {"norm.weight_scale", "norm.weight_scale_inv", "norm.input_scale", "norm.weight_zero_point",
        "norm.qweight", "norm.qzeros", "norm.g_idx", "norm.scales", "norm.weight.absmax",
        "norm.weight.quant_state.bitsandbytes__nf4", "norm.SCB"}) {
    auto tensors = stored();
    tensors.push_back(f32("model.language_model." + name, {1}, {0}));
    EXPECT_THAT(Toy(false).refusal(tensors), AllOf(HasSubstr(name), HasSubstr("quantis")));
  }
}

FileTensor half_norm(const std::string& dtype) {
  // 1.0 and 2.0: bfloat16 0x3f80 0x4000, float16 0x3c00 0x4000.
  const bool bf16 = dtype == "BF16";
  return {kNorm, dtype, {2}, bytes_of<uint16_t>({uint16_t(bf16 ? 0x3f80 : 0x3c00), 0x4000})};
}

TEST(LoadWeights, ConvertsMixedFilesToTheDtypeOfMostParameters) {
  for (const std::string dtype : {"BF16", "F16"}) {
    Toy toy(false);
    const LoadReport report = toy.load(stored_with_norm(half_norm(dtype)));
    EXPECT_EQ(report.dtype, at::kFloat);
    EXPECT_THAT(report.converted, ElementsAre(kNorm));
    EXPECT_EQ(toy.norm.scalar_type(), at::kFloat);
    EXPECT_THAT(floats(toy.norm), ElementsAre(1, 2));
  }
}

TEST(LoadWeights, KeepsASixteenBitDtypeThatHoldsMostParameters) {
  Toy toy(true);
  const std::string four = bytes_of<uint16_t>({0x3f80, 0x3f80, 0x3f80, 0x3f80});
  const LoadReport report = toy.load({{kEmbed, "BF16", {2, 2}, four},
                                      f32(kNorm, {2}, {1, 2}),
                                      {kPositions, "BF16", {3, 1}, four.substr(0, 6)}});
  EXPECT_EQ(report.dtype, at::kBFloat16);
  EXPECT_EQ(toy.norm.scalar_type(), at::kBFloat16);
  EXPECT_EQ(toy.embed.scalar_type(), at::kBFloat16);
}

TEST(LoadWeights, ConvertsToTheDtypeAskedFor) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    Toy toy(false);
    LoadOptions options;
    options.dtype = dtype;
    EXPECT_EQ(toy.load(stored(), options).converted.size(), 4u);
    EXPECT_EQ(toy.embed.scalar_type(), dtype);
    EXPECT_THAT(floats(toy.positions), ElementsAre(7, 8, 9));
  }
}

TEST(LoadWeights, RefusesToRunInIntegers) {
  LoadOptions options;
  options.dtype = at::kInt;
  EXPECT_THAT(message_of<InputError>([&] { Toy(false).load(stored(), options); }),
              HasSubstr("int32"));
}

// ---- Experts, in the forms that they are stored in ----------------------------------------------

const std::string kUp = "model.language_model.layers.0.mlp.experts.gate_up_proj";

/// Two experts of [4, 3]: rows 0 and 1 the gate's, 2 and 3 the other's.
struct Mixture {
  LoadReport load(const std::vector<FileTensor>& stored, const LoadOptions& options = {}) {
    folder.write("model.safetensors", safetensors_file(stored));
    return load_weights(specs, Checkpoint::open(folder.path()), options);
  }
  std::string refusal(const std::vector<FileTensor>& stored) {
    return message_of<CheckpointError>([&] { load(stored); });
  }

  TempFolder folder;
  at::Tensor up;
  std::vector<WeightSpec> specs{{kUp, {2, 4, 3}, &up, "", {"gate_proj.weight", "up_proj.weight"}}};
};

std::vector<float> numbers(int from, int count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), static_cast<float>(from));
  return values;
}

std::vector<FileTensor> expert_by_expert() {
  const std::string experts = "model.layers.0.mlp.experts.";
  return {f32(experts + "0.gate_proj.weight", {2, 3}, numbers(0, 6)),
          f32(experts + "0.up_proj.weight", {2, 3}, numbers(6, 6)),
          f32(experts + "1.gate_proj.weight", {2, 3}, numbers(12, 6)),
          f32(experts + "1.up_proj.weight", {2, 3}, numbers(18, 6))};
}

/// `numbers(0, 24)` as [2, 4, 3], stored with the last two axes exchanged.
FileTensor with_axes_exchanged() {
  std::vector<float> values;
  for (int e = 0; e < 2; ++e) {
    for (int in = 0; in < 3; ++in) {
      for (int out = 0; out < 4; ++out) values.push_back(static_cast<float>(12 * e + 3 * out + in));
    }
  }
  return f32(kUp, {2, 3, 4}, values);
}

TEST(LoadExperts, GiveTheSameWeightInEveryForm) {
  const std::vector<std::vector<FileTensor>> forms = {
      {f32(kUp, {2, 4, 3}, numbers(0, 24))}, {with_axes_exchanged()}, expert_by_expert()};
  for (const auto& form : forms) {
    for (const bool copy : {false, true}) {
      Mixture mixture;
      LoadOptions options;
      options.copy = copy;
      EXPECT_THAT(mixture.load(form, options).ignored, IsEmpty());
      EXPECT_EQ(mixture.up.sizes(), at::IntArrayRef({2, 4, 3}));
      EXPECT_EQ(floats(mixture.up), numbers(0, 24));
    }
  }
}

TEST(LoadExperts, AreUsedInPlaceWithTheirAxesExchanged) {
  Mixture mixture;
  mixture.load({with_axes_exchanged()});
  EXPECT_EQ(mixture.up.strides(), at::IntArrayRef({12, 1, 4}));
  Mixture converted;
  LoadOptions options;
  options.dtype = at::kBFloat16;
  EXPECT_EQ(converted.load({with_axes_exchanged()}, options).converted.size(), 1);
  EXPECT_TRUE(converted.up.is_contiguous());
  EXPECT_EQ(floats(converted.up), numbers(0, 24));
}

// --- Streaming -----------------------------------------------------------------------------------

/// The same numbers, which must be ones of bfloat16.
FileTensor as_bf16(FileTensor tensor) {
  std::string bytes;
  for (std::size_t i = 2; i < tensor.bytes.size(); i += 4) bytes += tensor.bytes.substr(i, 2);
  return {tensor.name, "BF16", tensor.shape, bytes};
}

LoadOptions streaming() {
  LoadOptions options;
  options.stream = true;
  return options;
}

/// The toy, whose embedding and head are large.
struct Streamed : Toy {
  Streamed() : Toy(true) {
    specs[0] = {kEmbed, {2, 2}, &table.stored, "", {}, &table};
    specs[3] = {kHead, {2, 2}, &projection.stored, kEmbed, {}, &projection};
  }
  LargeWeight table, projection;
};

TEST(LoadStream, LeavesLargeWeightsAsStoredAndConvertsTheRestToFloat32) {
  auto tensors = stored_without(kHead);
  for (FileTensor& tensor : tensors) tensor = as_bf16(tensor);
  Streamed toy;
  const LoadReport report = toy.load(tensors, streaming());
  EXPECT_EQ(report.dtype, at::kFloat);
  EXPECT_THAT(report.streamed, ElementsAre(tensors[0].name));
  EXPECT_THAT(report.converted, ElementsAre(tensors[1].name, tensors[2].name));
  EXPECT_EQ(toy.table.stored.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(toy.projection.stored.is_same(toy.table.stored));
  EXPECT_THAT(floats(toy.table.stored), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(toy.norm.scalar_type(), at::kFloat);
  EXPECT_THAT(floats(toy.norm), ElementsAre(5, 6));
}

TEST(LoadStream, ListsExpertsThatAreStoredOneByOne) {
  Mixture mixture;
  LargeWeight weight;
  mixture.specs[0].slot = &weight.stored;
  mixture.specs[0].large = &weight;
  auto parts = expert_by_expert();
  for (FileTensor& part : parts) part = as_bf16(part);
  EXPECT_EQ(mixture.load(parts, streaming()).streamed.size(), 4);
  EXPECT_FALSE(weight.stored.defined());
  ASSERT_EQ(weight.parts.size(), 4);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(floats(weight.parts[i]), numbers(6 * i, 6));
  EXPECT_EQ(expert_part_names(mixture.specs[0])[2],
            "model.language_model.layers.0.mlp.experts.1.gate_proj.weight");

  mixture.load({as_bf16(with_axes_exchanged())}, streaming());
  EXPECT_TRUE(weight.parts.empty());
  EXPECT_EQ(weight.stored.strides(), at::IntArrayRef({12, 1, 4}));
  EXPECT_EQ(floats(weight.stored), numbers(0, 24));
}

TEST(LoadStream, IsRefusedWithACopyAndOnADevice) {
  LoadOptions copied = streaming(), moved = streaming(), placed = streaming();
  copied.copy = true;
  moved.device = at::kMeta;
  placed.device_of = [](const std::string& name) { return name == kHead ? at::kMeta : at::kCPU; };
  for (const LoadOptions& options : {copied, moved, placed}) {
    Streamed toy;
    EXPECT_THROW(toy.load(stored(), options), InputError);
    EXPECT_FALSE(toy.norm.defined());
  }
}

TEST(LoadExperts, AreTakenAsTheyAreWhereTheShapeDoesNotTell) {
  at::Tensor square;
  const TempFolder folder;
  folder.write("model.safetensors", safetensors_file({f32(kUp, {1, 2, 2}, {1, 2, 3, 4})}));
  load_weights({{kUp, {1, 2, 2}, &square, "", {"gate_proj.weight", "up_proj.weight"}}},
               Checkpoint::open(folder.path()));
  EXPECT_THAT(floats(square), ElementsAre(1, 2, 3, 4));
}

TEST(LoadExperts, NameWhatIsMissingOrOfAnotherShape) {
  auto parts = expert_by_expert();
  parts.erase(parts.begin() + 2);
  EXPECT_THAT(Mixture().refusal(parts),
              HasSubstr("experts.1.gate_proj.weight\" of shape [2, 3] is not stored; 1 of the "
                        "model's 1 weights are missing"));
  parts = expert_by_expert();
  parts[1] = f32(parts[1].name, {3, 2}, numbers(0, 6));
  EXPECT_THAT(Mixture().refusal(parts), HasSubstr("has shape [3, 2], the config asks for [2, 3]"));
  EXPECT_THAT(Mixture().refusal({f32(kUp, {2, 2, 3}, numbers(0, 12))}),
              HasSubstr("has shape [2, 2, 3], the config asks for [2, 4, 3] or [2, 3, 4]"));
}

TEST(LoadExperts, AreRefusedInTwoForms) {
  auto both = expert_by_expert();
  both.push_back(f32(kUp, {2, 4, 3}, numbers(0, 24)));
  EXPECT_THAT(Mixture().refusal(both),
              AllOf(HasSubstr("experts.0.gate_proj.weight"), HasSubstr("keep one of the two")));
}

}  // namespace
}  // namespace vlscope
