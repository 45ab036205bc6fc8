// Copies of a model with noise in their weights: what one update after another looks like.
#pragma once

#include <string>

namespace carryover {

// A copy of the folder, whose safetensors hold bf16, in which every tensor whose name begins with
// `tensors` ("" means all) has noise added: step times the tensor's root mean square, normally
// distributed, the same at every call. Fails the test, and gives "", where nothing was changed. The
// caller removes the copy.
std::string PerturbedModel(const std::string& folder, const std::string& tensors, double step);

}  // namespace carryover
