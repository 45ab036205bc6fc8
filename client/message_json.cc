#include "client/message_json.h"

#include <charconv>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"

namespace carryover {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

// The double that prints with the fewest digits that still name this float: 0.1f gives 0.1.
Json FloatToJson(float value) {
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  double shortest;
  if (!absl::SimpleAtod(absl::string_view(digits, end - digits), &shortest)) return value;
  return shortest;
}

// index: -1 for a field that is not repeated.
Json FieldToJson(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* reflection = message.GetReflection();
  const bool one = index < 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return one ? reflection->GetInt32(message, field)
                 : reflection->GetRepeatedInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_INT64:
      return one ? reflection->GetInt64(message, field)
                 : reflection->GetRepeatedInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT32:
      return one ? reflection->GetUInt32(message, field)
                 : reflection->GetRepeatedUInt32(message, field, index);
    case FieldDescriptor::CPPTYPE_UINT64:
      return one ? reflection->GetUInt64(message, field)
                 : reflection->GetRepeatedUInt64(message, field, index);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return one ? reflection->GetDouble(message, field)
                 : reflection->GetRepeatedDouble(message, field, index);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return FloatToJson(one ? reflection->GetFloat(message, field)
                             : reflection->GetRepeatedFloat(message, field, index));
    case FieldDescriptor::CPPTYPE_BOOL:
      return one ? reflection->GetBool(message, field)
                 : reflection->GetRepeatedBool(message, field, index);
    case FieldDescriptor::CPPTYPE_ENUM: {
      const auto* value = one ? reflection->GetEnum(message, field)
                              : reflection->GetRepeatedEnum(message, field, index);
      return value->name();
    }
    case FieldDescriptor::CPPTYPE_STRING:
      return one ? reflection->GetString(message, field)
                 : reflection->GetRepeatedString(message, field, index);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageToJson(one ? reflection->GetMessage(message, field)
                               : reflection->GetRepeatedMessage(message, field, index));
  }
  return nullptr;
}

}  // namespace

Json MessageToJson(const Message& message) {
  Json json = Json::object();
  const Reflection* reflection = message.GetReflection();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->is_repeated()) {
      Json list = Json::array();
      for (int j = 0; j < reflection->FieldSize(message, field); ++j) {
        list.push_back(FieldToJson(message, field, j));
      }
      json[field->name()] = std::move(list);
    } else if (!field->has_presence() || reflection->HasField(message, field)) {
      json[field->name()] = FieldToJson(message, field, -1);
    }
  }
  return json;
}

}  // namespace carryover
