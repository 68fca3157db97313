// The forward of a recorded prompt's last positions alone.
#pragma once

#include "models/config.h"
#include "models/inputs.h"
#include "models/text/model.h"

namespace vlscope {

/// Refuses a tail that the recording of `inputs` does not hold: the prompt is checked already.
/// @throws InputError naming both numbers: `first` beyond the prompt, no copy, a batch, a recording
/// without keys, blocks that carry a state.
void check_tail(const Tail& tail, const Inputs& inputs, const Config& config);

/// What the text model is given for the tail of recorded, checked inputs. Attention is causal, so
/// the positions before it are what they were, whatever is changed in it: their keys and values are
/// the recording's. Batched: every copy is a row.
/// @param deepstack whether the family adds DeepStack levels.
TextModel::Input tail_of(const Inputs& inputs, const Config& config, bool deepstack);

}  // namespace vlscope
