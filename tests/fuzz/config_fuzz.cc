// parse_config on any bytes: a model whose sizes fit together, or a ConfigError.
#include <cstdint>
#include <string_view>

#include "core/errors.h"
#include "models/config.h"
#include "tests/fuzz/expect.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace vlscope;
  try {
    const Config config = parse_config({reinterpret_cast<const char*>(data), size}, "fuzz");
    const TextConfig& text = config.text;
    expect(text.num_attention_heads % text.num_key_value_heads == 0, "heads share keys evenly");
    expect(text.rotary_dim() % 2 == 0 && text.rotary_dim() <= text.head_dim,
           "whole pairs of a head are rotated");
    expect(config.vision.out_hidden_size == text.hidden_size, "the tower fits the text model");
    expect(config.vision.head_dim() % 4 == 0, "the tower's heads have two rotary axes");
    text_card(config);
    vision_card(config);
  } catch (const ConfigError&) {
  }
  return 0;
}
