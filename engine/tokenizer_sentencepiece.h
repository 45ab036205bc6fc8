// tokenizer.model: a SentencePiece vocabulary (BPE or unigram). Used by Tokenizer::Load alone.
//
// As the reference does, tokens of tokenizer_config.json and the model's control pieces are
// recognised in the text; BOS and EOS go around it as add_bos_token and add_eos_token say; and
// unless "legacy" is false, a text behind such a token gets the model's leading space again.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/tokenizer.h"

namespace carryover {

// Reads FOLDER/tokenizer.model and, where there is one, FOLDER/tokenizer_config.json.
absl::StatusOr<std::unique_ptr<const Tokenizer>> LoadSentencePieceTokenizer(
    const std::string& folder);

}  // namespace carryover
