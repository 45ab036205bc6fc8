// A protobuf message as JSON with the proto's own field names. Unlike protobuf's JSON, 64-bit
// integers are numbers, for jq and the like; fields without presence are always there.
#pragma once

#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"

namespace carryover {

nlohmann::ordered_json MessageToJson(const google::protobuf::Message& message);

}  // namespace carryover
