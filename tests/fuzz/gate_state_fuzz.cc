// The gate's saved state behind its header and with a checksum that fits, so that every value is
// read. What is taken must give a gate that goes on, and saves what it reads again.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/hash.h"
#include "base/status_macros.h"
#include "engine/gate.h"

namespace {

std::string Signed(std::string body) {
  const carryover::Digest sum = carryover::Sha256(body);
  return body.append(reinterpret_cast<const char*>(sum.data()), sum.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace carryover;
  GateConfig config;
  config.max_cells = 8;
  config.ladder = {"direct", "tail(32)"};
  static const std::string* const header = [&config] {
    const std::string empty = Gate(config).Save(0);
    // Four empty lists and the checksum follow the header.
    return new std::string(empty.substr(0, empty.size() - 4 * 8 - sizeof(Digest)));
  }();
  Gate gate(config);
  const std::string bytes =
      Signed(*header + std::string(reinterpret_cast<const char*>(data), size));
  const absl::Status restored = gate.Restore(bytes, 0);
  if (!restored.ok()) {
    CHECK(restored.code() == absl::StatusCode::kDataLoss);
    CHECK(gate.cells() == 0);
    return 0;
  }
  GateSample sample;
  sample.prefix = size;
  for (const CellReport& report : gate.Report(0)) {
    sample.cell = report.cell;
    for (const MeasureReport& measure : report.measures) {
      CHECK(measure.open_evidence >= 0 && measure.close_evidence >= 0);
      CHECK(measure.mean >= 0 && measure.mean <= 1.001);
    }
    sample.prefix += 77;
    gate.Observe(sample, 1);
    sample.dropped = !sample.dropped;
  }
  gate.Tick(1e9);
  Gate again(config);
  CHECK(again.Restore(gate.Save(2), 2).ok());
  CHECK(again.cells() == gate.cells());
  return 0;
}
