#include "hooks/values.h"

#include <algorithm>

namespace vlscope {
namespace {

const std::string kPerImage =
    "no one tensor is the block's pattern: the attention runs once per image (or window), over the "
    "slices that cu_seqlens marks. Read image_attention_probabilities, or softmax the scores of "
    "each slice: "
    "(q[0, :, a:b] @ k[0, :, a:b].transpose(-1, -2) * model.vision.head_dim ** -0.5).softmax(-1)";

Field keyword(std::string name, int slots = 1) { return {std::move(name), true, slots, false}; }
Field fixed(Field field) {
  field.read_only = true;
  return field;
}

/// What the whole model and the model below its head are called with.
std::vector<Field> model_inputs() {
  return {keyword("input_ids"),           keyword("attention_mask"), keyword("pixel_values"),
          keyword("pixel_values_videos"), keyword("image_grid_thw"), keyword("video_grid_thw"),
          keyword("second_per_grid_ts")};
}

/// A mask over the tokens; all of them are served at one location.
Value token_mask(const std::string& kind, const std::string& tokens, int slot) {
  const std::string name = kind + "_token_mask";
  return {name,
          "ImageTokenMask",
          "batch seq",
          "True at the " + tokens + " tokens",
          "image_token_mask",
          slot,
          View::kCopy,
          name + " follows from the token ids: assign model.input_ids"};
}

/// The values of an attention that both towers serve, up to the axes.
std::vector<Value> attention_values(const std::string& queries, const std::string& keys,
                                    const std::string& heads, const std::string& output,
                                    const std::string& rotary, View view) {
  return {
      {"attention_queries", "Queries", queries, "queries after " + rotary, "attention_queries", 0},
      {"attention_keys", "Keys", keys, "keys after " + rotary, "attention_queries", 1},
      {"attention_values", "Values", keys, "values, before any head is repeated",
       "attention_queries", 2},
      {"attention_scores", "Pattern", "batch heads query key",
       "scaled and masked scores; a masked score is the dtype's least number", "attention_scores"},
      {"attention_probabilities", "Pattern", "batch heads query key", "softmax of the scores",
       "attention_probabilities"},
      {"attention_head_outputs", "HeadOutputs", heads, "each head's weighted sum of values",
       "attention_head_outputs"},
      {"attention_output", "Residual", output, "what the attention adds to the stream", "output", 0,
       view},
  };
}

std::vector<Value> gated_attention_values() {
  auto values = attention_values("batch heads seq head_dim", "batch kv_heads seq head_dim",
                                 "batch seq heads head_dim", "batch seq hidden_size",
                                 "the norm of each head and M-RoPE", View::kWhole);
  for (Value& value : values) {
    if (value.name == "attention_head_outputs") value.description += ", before the gate";
  }
  return values;
}

const std::string kLinearKeys = "batch seq linear_heads linear_key_dim";
const std::string kLinearValues = "batch seq linear_heads linear_value_dim";
const std::string kLinearGates = "batch seq linear_heads";
const std::string kLinearState = "batch linear_heads linear_key_dim linear_value_dim";

/// A pattern for each segment of cu_seqlens.
Value per_image(const std::string& name, const std::string& description) {
  Value value{name, "ImagePattern", "heads query key",
              description + " of each image and video frame; of each window in windowed blocks",
              name};
  value.list = true;
  return value;
}

std::vector<Value> vision_attention_values() {
  auto values =
      attention_values("images heads patches head_dim", "images heads patches head_dim",
                       "images patches heads head_dim", "images patches vision_hidden_size",
                       "the 2-D rotary embedding, every image in one row", View::kImagesAxis);
  for (Value& value : values) {
    if (value.name == "attention_output") value.layout = "Patches";
    if (value.layout != "Pattern") continue;
    value.dims = "";
    value.unavailable = kPerImage;
  }
  const auto heads = std::find_if(values.begin(), values.end(), [](const Value& value) {
    return value.name == "attention_head_outputs";
  });
  values.insert(heads, {per_image("image_attention_scores", "scaled scores"),
                        per_image("image_attention_probabilities", "softmax of the scores")});
  return values;
}

}  // namespace

namespace kinds {

const Kind causal_lm{
    "CausalLM",
    "The whole model. Its values stand at the two ends of the forward.",
    model_inputs(),
    Form::kRecord,
    {{"logits"}},
    {
        {"input_ids", "Tokens", "batch seq", "token ids, placeholders expanded", "input", 0},
        {"attention_mask", "Tokens", "batch seq", "1 on tokens, 0 on padding", "input", 1},
        {"token_embeddings", "Residual", "batch seq hidden_size",
         "embedded tokens; image and video tokens still hold the placeholder's embedding",
         "model.language_model.embed_tokens.output"},
        {"logits", "Logits", "batch seq vocab_size", "scores of the next token at each position",
         "lm_head.output", 0},
        {"next_token_probs", "NextTokenProbs", "batch vocab_size",
         "softmax of the logits at each prompt's last token", "lm_head.output", 1, View::kWhole,
         "next_token_probs is computed from the logits: assign model.logits"},
    },
    {{"layers", "model.language_model.layers"},
     {"embed_tokens", "model.language_model.embed_tokens"},
     {"norm", "model.language_model.norm"},
     {"vision", "model.visual"},
     {"projector", "model.visual.merger"}}};

const Kind multimodal_model{"MultimodalModel",
                            "Vision tower and text model, without the head.",
                            model_inputs(),
                            Form::kRecord,
                            {{"last_hidden_state"}}};

const Kind text_model{
    "TextModel",
    "The text model: rotary tables, blocks, DeepStack adds, final norm.",
    {keyword("inputs_embeds"), keyword("attention_mask"), fixed(keyword("position_ids")),
     fixed(keyword("visual_pos_masks")), keyword("deepstack_visual_embeds", Field::kList)},
    Form::kRecord,
    {{"last_hidden_state"}}};

const Kind text_layer{
    "TextLayer",
    R"(One block of the text model.

    h   = x + self_attn(input_layernorm(x))
    out = h + mlp(post_attention_layernorm(h))

so layer_input + attention_output + mlp_output == layer_output, bit for bit. Where a family has linear
attention, most blocks have linear_attn in the place of self_attn.

With images or videos a text model with DeepStack then adds DeepStack level k after block k (the first blocks only):

    layers[k+1].input[mask]  == layers[k].layer_output[mask] + layers[k].deepstack_output
    layers[k+1].input[~mask] == layers[k].layer_output[~mask]

with mask = vision.visual_token_mask, which on an image prompt is vision.image_token_mask.
layer_output is the stream before that add.)",
    {{"hidden_states"}, keyword("attention_mask"), keyword("position_embeddings", 2)},
    Form::kTensor,
    {{"hidden_states"}},
    {
        {"layer_input", "Residual", "batch seq hidden_size", "the stream entering the block",
         "input", 0},
        {"layer_output", "Residual", "batch seq hidden_size",
         "the stream leaving the block, before any DeepStack add", "output", 0},
        {"deepstack_output", "ImageFeatures", "image_tokens hidden_size",
         "DeepStack features added at the image and video tokens after this block",
         "deepstack_output"},
    }};

const Kind text_attention{
    "TextAttention",
    R"(Grouped-query attention of a text block: projections, in the Qwen3 lines q_norm and k_norm of
each head, then M-RoPE.

attention_row(query, heads) gives rows of attention_probabilities without making the whole.)",
    {keyword("hidden_states"), keyword("attention_mask"), keyword("position_embeddings", 2)},
    Form::kTuple,
    {{"attention_output"}, {"attention_probabilities"}},
    attention_values("batch heads seq head_dim", "batch kv_heads seq head_dim",
                     "batch seq heads head_dim", "batch seq hidden_size",
                     "M-RoPE (in the Qwen3 lines, of normed heads)", View::kWhole)};

const Kind gated_attention{
    "GatedAttention",
    R"(Grouped-query attention with an output gate: q_norm and k_norm per head, then M-RoPE on the first
dimensions of each head.

    attention_output = o_proj(attention_head_outputs.flatten(2) * sigmoid(gate))

where q_proj gives each head its queries and behind them its gate.

attention_row(query, heads) gives rows of attention_probabilities without making the whole.)",
    {keyword("hidden_states"), keyword("attention_mask"), keyword("position_embeddings", 2)},
    Form::kTuple,
    {{"attention_output"}, {"attention_probabilities"}},
    gated_attention_values(),
};

const Kind delta_net{
    "GatedDeltaNet",
    R"(Gated DeltaNet, a linear attention. Each head keeps a matrix S, [key, value], that maps keys to values.
For each token, with queries and keys scaled to length one and queries divided by sqrt(linear_key_dim):

    S = exp(decay) * S
    S = S + outer(k, beta * (v - k @ S))
    attention_head_outputs[t] = q @ S

    attention_output = out_proj(norm(attention_head_outputs, z))

A prompt goes by chunks of tokens, a later step of a generation token by token; both give the same up to
rounding. states, when read, are made token by token; written, they are what the tokens read.
state_after(t) gives one of them, and set_state_after(t, value) puts another in its place, from which the
tokens behind go on.)",
    {keyword("hidden_states"), keyword("attention_mask")},
    Form::kTensor,
    {{"hidden_states"}},
    {
        {"attention_queries", "LinearQK", kLinearKeys,
         "queries after the convolution, repeated for the heads that share them, not yet scaled",
         "attention_queries", 0},
        {"attention_keys", "LinearQK", kLinearKeys,
         "keys after the convolution, repeated for the heads that share them, not yet scaled",
         "attention_queries", 1},
        {"attention_values", "LinearV", kLinearValues, "values after the convolution",
         "attention_queries", 2},
        {"decays", "Gates", kLinearGates,
         "logarithm of what is left of the state, 0 or less, in float32", "attention_queries", 3},
        {"betas", "Gates", kLinearGates,
         "how much of the old value under its key a token replaces, 0 to 1", "attention_queries",
         4},
        {"state_input", "State", kLinearState,
         "the state that the step before left, in float32; None on a prompt", "attention_queries",
         5},
        {"state", "State", kLinearState,
         "the state before the first token: state_input, or zeros on a prompt", "state"},
        {"states", "States", "batch seq linear_heads linear_key_dim linear_value_dim",
         "the state behind each token", "states"},
        {"attention_head_outputs", "LinearV", kLinearValues,
         "what each head reads from its state, before the gated norm", "attention_head_outputs", 0},
        {"state_output", "State", kLinearState,
         "the state behind the last token, which the next step starts from",
         "attention_head_outputs", 1},
        {"attention_output", "Residual", "batch seq hidden_size",
         "what the linear attention adds to the stream", "output"},
    },
};

const Kind text_mlp{"TextMLP",
                    "SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)).",
                    {{"x"}},
                    Form::kTensor,
                    {{"x"}},
                    {{"mlp_output", "Residual", "batch seq hidden_size",
                      "what the MLP adds to the stream", "output", 0}}};

const Kind text_mixture{
    "TextMixture",
    R"(A mixture of experts in the place of a block's MLP.

    routed_output = expert_outputs.sum(2);  mlp_output = routed_output [+ shared_expert_output]

where expert_outputs[b, t, j] is expert_weights[b, t, j] times what expert expert_indices[b, t, j]
makes of the token. Weights are the largest of the router's softmax, divided by their sum. Editing
router_logits routes anew; a weight of zero takes a slot out; an index that is changed keeps its
weight.)",
    {{"hidden_states"}},
    Form::kTensor,
    {{"hidden_states"}},
    {
        {"router_logits", "RouterLogits", "batch seq experts",
         "the router's score of each expert, before the softmax", "gate.router_logits", 0,
         View::kBatchAxis},
        {"expert_weights", "ExpertWeights", "batch seq top_k",
         "the weights of the chosen experts, in descending order of the router; they sum to 1",
         "gate.output", 1, View::kBatchAxis},
        {"expert_indices", "ExpertIndices", "batch seq top_k",
         "which experts are chosen, in the same order", "gate.output", 2, View::kBatchAxis},
        {"expert_outputs", "ExpertOutputs", "batch seq top_k hidden_size",
         "what each chosen expert adds, weight included", "experts.expert_outputs", 0,
         View::kBatchAxis},
        {"routed_output", "Residual", "batch seq hidden_size",
         "the sum of what the chosen experts add", "experts.output", 0, View::kBatchAxis},
        {"shared_expert_output", "Residual", "batch seq hidden_size",
         "what the shared expert adds, its gate included", "shared_expert_output", 0,
         View::kBatchAxis},
        {"mlp_output", "Residual", "batch seq hidden_size", "what the MLP adds to the stream",
         "output", 0},
    }};

const Kind shared_expert{
    "SharedExpert",
    R"(The MLP of a mixture that every token goes to, on all tokens of all prompts in one row:
down_proj(silu(gate_proj(x)) * up_proj(x)).)",
    {{"x"}},
    Form::kTensor,
    {{"x"}}};

const Kind router{
    "Router",
    R"(The router of a mixture, on all tokens of all prompts in one row: softmax(W x) in float32, the
largest of it divided by their sum.)",
    {{"hidden_states"}},
    Form::kTuple,
    {{"router_logits"}, {"expert_weights"}, {"expert_indices"}}};

const Kind experts{
    "Experts",
    R"(The experts of a mixture, on all tokens of all prompts in one row. Only those that a token goes to
are computed, and only their weights are read. act_fn runs on the rows of all slots, sorted by expert.)",
    {{"hidden_states"}, {"top_k_index"}, {"top_k_weights"}},
    Form::kTensor,
    {{"hidden_states"}}};

const Kind text_rotary{
    "TextRotary",
    "M-RoPE tables: cos and sin, folded from the time, height and width positions.",
    {{"x"}, fixed({"position_ids"})},
    Form::kTuple,
    {{"cos"}, {"sin"}}};

const Kind vision{
    "Vision",
    R"(The vision tower. All images of the prompt, and behind them all frames of its videos, lie in one
row of patches, in merge-block order: each four consecutive rows are the 2 x 2 block that becomes
one image or video token.

An image reaches the text model by image_features, scattered at the image tokens, and in families
with DeepStack by each layers[k].deepstack_output, which is deepstack_merger_list[k].output; a video
by video_features and the same. With images and videos in one prompt, deepstack_output has its rows in the order of the
prompt (visual_token_mask), and the tower the images first.

Qwen2.5-VL orders each frame by windows between patch_embeddings and layers[0], and back between
projector.output and image_features.)",
    {{"hidden_states"}, fixed(keyword("grid_thw"))},
    Form::kRecord,
    {{"last_hidden_state"}, {"pooler_output"}, {"deepstack_features", false, Field::kList}},
    {
        token_mask("image", "image", 0),
        token_mask("video", "video", 1),
        token_mask("visual", "image and video", 2),
        {"patch_embeddings", "Patches", "images patches vision_hidden_size",
         "projected patches, before any position", "patch_embed.output", 0, View::kImagesAxis},
        {"tower_output", "Patches", "images patches vision_hidden_size",
         "the last block's stream; the projector has already read it, so a write moves nothing",
         "output", 0, View::kImagesAxis},
        {"image_features", "ImageFeatures", "image_tokens hidden_size",
         "what is scattered at the image tokens", "image_features", 0, View::kWhole, "", "",
         Needs::kImage},
        {"video_features", "ImageFeatures", "video_tokens hidden_size",
         "what is scattered at the video tokens", "image_features", 1, View::kWhole, "", "",
         Needs::kVideo},
    },
    {{"layers", "blocks"}}};

const Kind vision_layer{"VisionLayer",
                        R"(One block of the vision tower.

    h   = x + attn(norm1(x))
    out = h + mlp(norm2(h))

so layer_input + attention_output + mlp_output == layer_output, bit for bit.)",
                        {{"hidden_states"},
                         fixed(keyword("cu_seqlens")),
                         fixed(keyword("max_seqlen")),
                         keyword("position_embeddings", 2)},
                        Form::kTensor,
                        {{"hidden_states"}},
                        {
                            {"layer_input", "Patches", "images patches vision_hidden_size",
                             "the stream entering the block", "input", 0, View::kImagesAxis},
                            {"layer_output", "Patches", "images patches vision_hidden_size",
                             "the stream leaving the block", "output", 0, View::kImagesAxis},
                        },
                        {{"self_attn", "attn"}}};

const Kind vision_attention{
    "VisionAttention",
    R"(Attention of a vision block, within each image (and video frame); in most blocks of Qwen2.5-VL
within each window.

    image_attention_probabilities[j] @ attention_values[0, :, a:b]
        == attention_head_outputs[0, a:b].transpose(0, 1)

with a, b = cu_seqlens[j], cu_seqlens[j + 1].)",
    {{"hidden_states"},
     fixed(keyword("cu_seqlens")),
     fixed(keyword("max_seqlen")),
     keyword("position_embeddings", 2)},
    Form::kTensor,
    {{"hidden_states"}},
    vision_attention_values()};

const Kind vision_mlp{"VisionMLP",
                      R"(The MLP of a vision block.

    Qwen3 lines   linear_fc2(gelu(linear_fc1(x))), GELU by its tanh form
    Qwen2.5-VL    down_proj(silu(gate_proj(x)) * up_proj(x))
    Qwen2-VL      fc2(h * sigmoid(1.702 h)) with h = fc1(x))",
                      {{"hidden_state"}},
                      Form::kTensor,
                      {{"hidden_state"}},
                      {{"mlp_output", "Patches", "images patches vision_hidden_size",
                        "what the MLP adds to the stream", "output", 0, View::kImagesAxis}}};

const Kind vision_rotary{"VisionRotary",
                         "2-D rotary tables: cos and sin of each patch's row and column.",
                         {{"x"}, fixed({"position_ids"})},
                         Form::kTuple,
                         {{"cos"}, {"sin"}}};

const Kind patch_embed{
    "PatchEmbed",
    "Projects each patch of pixels (2 x 16 x 16; 2 x 14 x 14 in the Qwen2 lines) to one vector.",
    {{"hidden_states"}},
    Form::kTensor,
    {{"hidden_states"}}};

const Kind projector{
    "Projector",
    "The merger: norm, then each 2 x 2 block of patches to one image token by a two-layer MLP.",
    {{"x"}},
    Form::kTensor,
    {{"x"}}};

const Kind merger{
    "Merger",
    "A DeepStack merger: as the projector, with the norm after the 2 x 2 concatenation.",
    {{"x"}},
    Form::kTensor,
    {{"x"}}};

const Kind sequential{"Sequential",
                      "Modules that run one after the other: sequential[0], sequential[1], ...",
                      {{"input"}},
                      Form::kTensor,
                      {{"output"}}};
const Kind linear{"Linear", "y = x W^T + b.", {{"input"}}, Form::kTensor, {{"output"}}};
const Kind conv3d{"Conv3d",
                  "A convolution whose kernel and stride are one patch.",
                  {{"input"}},
                  Form::kTensor,
                  {{"output"}}};
const Kind conv1d{
    "CausalConv1d",
    R"(A causal convolution over time, of each channel by itself: [batch, channels, seq].
A later step of a generation continues from the inputs before.)",
    {{"input"}},
    Form::kTensor,
    {{"output"}}};
const Kind embedding{"Embedding", "Rows of a table.", {{"input"}}, Form::kTensor, {{"output"}}};
const Kind rms_norm{"RMSNorm",
                    "y = weight * x / rms(x), the rms taken in float32.",
                    {{"hidden_states"}},
                    Form::kTensor,
                    {{"hidden_states"}}};
const Kind zero_centered_rms_norm{"ZeroCenteredRMSNorm",
                                  "y = (1 + weight) * x / rms(x), all in float32.",
                                  {{"x"}},
                                  Form::kTensor,
                                  {{"x"}}};
const Kind gated_rms_norm{"GatedRMSNorm",
                          "y = weight * x / rms(x) * silu(gate), on rows of one head.",
                          {{"hidden_states"}, {"gate"}},
                          Form::kTensor,
                          {{"hidden_states"}}};
const Kind layer_norm{
    "LayerNorm", "y = weight * (x - mean) / std + bias.", {{"input"}}, Form::kTensor, {{"output"}}};
const Kind activation{
    "Activation", "An elementwise activation.", {{"input"}}, Form::kTensor, {{"output"}}};

}  // namespace kinds

const std::vector<const Kind*>& all_kinds() {
  using namespace kinds;
  static const std::vector<const Kind*> all = {
      &causal_lm,      &multimodal_model, &text_model,   &text_layer,
      &text_attention, &gated_attention,  &delta_net,    &text_mlp,
      &text_mixture,   &shared_expert,    &router,       &experts,
      &text_rotary,    &vision,           &vision_layer, &vision_attention,
      &vision_mlp,     &vision_rotary,    &patch_embed,  &projector,
      &merger,         &sequential,       &linear,       &conv3d,
      &conv1d,         &embedding,        &rms_norm,     &zero_centered_rms_norm,
      &gated_rms_norm, &layer_norm,       &activation};
  return all;
}

}  // namespace vlscope
