// The least model and input that show the order of a forward: which locations it visits depends on
// the blocks of a model, not on its widths, so a model of any size is numbered in milliseconds.
#pragma once

#include "models/config.h"
#include "models/inputs.h"

namespace vlscope {

/// `config` with every width, head and expert cut to a few numbers. What decides which modules
/// there are and in which order they run (blocks, mixers, mixtures, taps, windowed blocks) stays.
Config least_config(Config config);

/// One text token, and behind it one image of one merge block if asked for.
Inputs least_inputs(const Config& config, bool with_image);

}  // namespace vlscope
