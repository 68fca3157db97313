// The typed errors of the engine. Each reaches Python as the class of the same name in `vlscope`.
#pragma once

#include <stdexcept>

namespace vlscope {

/// Base of every error that the engine raises on purpose. The message names the thing, both sides
/// of the disagreement, and what to do.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// `config.json` is wrong or incomplete.
struct ConfigError : Error {
  using Error::Error;
};

/// The checkpoint is of a family that vlscope does not load.
struct UnsupportedFamily : ConfigError {
  using ConfigError::ConfigError;
};

/// A weight file is damaged, incomplete or at odds with the configuration.
struct CheckpointError : Error {
  using Error::Error;
};

/// A checkpoint path does not lead to what it should.
struct CheckpointNotFound : CheckpointError {
  using CheckpointError::CheckpointError;
};

/// Token ids, masks, grids, pixels or a written value do not fit.
struct InputError : Error {
  using Error::Error;
};

/// This model, this load or this mode cannot serve the value at all.
struct Unavailable : Error {
  using Error::Error;
};

/// The forward has already passed the value.
struct OutOfOrderError : Error {
  using Error::Error;
};

/// The forward of this input never reaches the value.
struct NotReachedError : OutOfOrderError {
  using OutOfOrderError::OutOfOrderError;
};

/// A served value was edited after the forward had moved on from it.
struct LateEditError : Error {
  using Error::Error;
};

}  // namespace vlscope
