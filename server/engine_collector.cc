#include "server/engine_collector.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace carryover {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

MetricFamily Family(const char* name, const char* help, MetricType type) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}

void AddSample(MetricFamily* family, double value, Labels labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (family->type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family->metric.push_back(std::move(metric));
}

MetricFamily Single(const char* name, const char* help, MetricType type, double value,
                    Labels labels = {}) {
  MetricFamily family = Family(name, help, type);
  AddSample(&family, value, std::move(labels));
  return family;
}

// A small file of /proc, or "".
std::string ReadProc(const char* path) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return "";
  char bytes[4096];
  const size_t size = std::fread(bytes, 1, sizeof(bytes), file);
  std::fclose(file);
  return std::string(bytes, size);
}

int OpenFiles() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  int count = -3;  // ".", ".." and the folder itself
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Of the boot, in seconds since 1970.
double BootTime() {
  const std::string stat = ReadProc("/proc/stat");
  const size_t at = stat.find("\nbtime ");
  double seconds = 0;
  if (at != std::string::npos) {
    const size_t begin = at + 7;
    if (!absl::SimpleAtod(stat.substr(begin, stat.find('\n', begin) - begin), &seconds)) return 0;
  }
  return seconds;
}

// One sample a cell and state, 1 for the state it is in, and its bounds a measure.
void AddGates(const std::vector<GateRow>& rows, std::vector<MetricFamily>* all) {
  MetricFamily states =
      Family("carryover_gate_state", "1 for the state that a cell is in.", MetricType::Gauge);
  MetricFamily samples =
      Family("carryover_gate_samples", "Completed samples of a cell's epoch.", MetricType::Gauge);
  MetricFamily dropped =
      Family("carryover_gate_dropped", "Shadows of a cell's epoch that did not complete.",
             MetricType::Gauge);
  MetricFamily forced =
      Family("carryover_gate_forced", "1 while an operator's state stands over a cell's.",
             MetricType::Gauge);
  MetricFamily bounds =
      Family("carryover_gate_bound", "A measure's anytime-valid bounds, mean, floor and limit.",
             MetricType::Gauge);
  for (const GateRow& row : rows) {
    const Labels labels = {
        {"model", row.cell.model},   {"source", row.cell.source},
        {"target", row.cell.target}, {"plan", row.cell.plan},
        {"task", row.cell.task},     {"prefix_bucket", std::to_string(row.cell.prefix_bucket)},
        {"answer", row.cell.answer}};
    const auto with = [&](std::vector<ClientMetric::Label> more) {
      Labels joined = labels;
      joined.insert(joined.end(), more.begin(), more.end());
      return joined;
    };
    for (const char* state : {"learning", "open", "repaired", "closed"}) {
      AddSample(&states, row.state == state ? 1 : 0, with({{"state", state}}));
    }
    AddSample(&samples, row.samples, labels);
    AddSample(&dropped, row.dropped, labels);
    AddSample(&forced, row.forced ? 1 : 0, labels);
    for (const GateBound& bound : row.bounds) {
      const auto add = [&](const char* side, double value) {
        AddSample(&bounds, value, with({{"measure", bound.measure}, {"side", side}}));
      };
      add("lower", bound.lower);
      add("upper", bound.upper);
      add("mean", bound.mean);
      add("floor", bound.floor);
      add("limit", bound.limit);
    }
  }
  for (MetricFamily* family : {&states, &samples, &dropped, &forced, &bounds})
    all->push_back(std::move(*family));
}

}  // namespace

const char kBuildVersion[] = CARRYOVER_VERSION;

std::vector<MetricFamily> EngineCollector::Collect() const {
  const EngineSnapshot now = engine_->snapshot();
  std::vector<MetricFamily> all;
  const Labels user = {{"class", "user"}};
  all.push_back(Single("carryover_requests_running", "Requests in a step now, by class.",
                       MetricType::Gauge, now.running, user));
  all.push_back(Single("carryover_requests_waiting", "Requests in the queue, by class.",
                       MetricType::Gauge, now.waiting, user));
  all.push_back(Single("carryover_waiting_tokens", "Prompt tokens in the queue.", MetricType::Gauge,
                       static_cast<double>(now.waiting_tokens)));
  all.push_back(Single("carryover_device_blocks", "KV blocks that there are.", MetricType::Gauge,
                       static_cast<double>(now.device_blocks)));
  all.push_back(Single("carryover_device_blocks_used", "KV blocks that requests or the store hold.",
                       MetricType::Gauge, static_cast<double>(now.device_blocks_used)));
  all.push_back(Single("carryover_device_blocks_active",
                       "KV blocks that requests alone hold; 0 when nothing runs.",
                       MetricType::Gauge, static_cast<double>(now.device_blocks_active)));

  MetricFamily blocks =
      Family("carryover_store_blocks", "Blocks in the store, by who computed them and tier.",
             MetricType::Gauge);
  MetricFamily bytes =
      Family("carryover_store_bytes", "Bytes in the store, by who computed them and tier.",
             MetricType::Gauge);
  for (const StoreRow& row : now.store) {
    const Labels labels = {
        {"model", row.model}, {"tier", row.tier}, {"provenance", row.provenance}};
    AddSample(&blocks, static_cast<double>(row.blocks), labels);
    AddSample(&bytes, static_cast<double>(row.bytes), labels);
  }
  all.push_back(std::move(blocks));
  all.push_back(std::move(bytes));

  MetricFamily evictions =
      Family("carryover_store_evictions_total", "Blocks that left the store, by tier and reason.",
             MetricType::Counter);
  for (const CounterRow& row : now.evictions) {
    AddSample(&evictions, static_cast<double>(row.count),
              {{"tier", row.first}, {"reason", row.second}});
  }
  all.push_back(std::move(evictions));
  MetricFamily rejects =
      Family("carryover_store_rejects_total",
             "Blocks that failed a check and were not used, by reason.", MetricType::Counter);
  for (const CounterRow& row : now.rejects) {
    AddSample(&rejects, static_cast<double>(row.count), {{"reason", row.second}});
  }
  all.push_back(std::move(rejects));
  all.push_back(Single("carryover_shadows_waiting",
                       "Sampled requests that wait for, or are in, their comparison.",
                       MetricType::Gauge, now.shadows_waiting));
  all.push_back(Single("carryover_gate_cells", "Cells that the gate knows.", MetricType::Gauge,
                       static_cast<double>(now.gate_cells)));
  all.push_back(Single("carryover_gate_refused_total",
                       "Decisions and samples beyond the configured number of cells.",
                       MetricType::Counter, static_cast<double>(now.gate_cells_refused)));
  const std::vector<GateRow> no_gates;
  AddGates(now.gates != nullptr ? *now.gates : no_gates, &all);
  all.push_back(Single("carryover_provenance_violations_total",
                       "Blocks computed over carried ones that were taken for native. Must be 0.",
                       MetricType::Counter, static_cast<double>(now.provenance_violations)));
  all.push_back(Single("carryover_steps_total", "Steps of the engine.", MetricType::Counter,
                       static_cast<double>(now.steps)));
  all.push_back(Single("carryover_replayed_passes_total",
                       "Passes that a device replayed as a graph.", MetricType::Counter,
                       static_cast<double>(now.replayed_passes)));
  all.push_back(Single("carryover_draining", "1 while the server refuses new work to end.",
                       MetricType::Gauge, now.draining ? 1 : 0));

  MetricFamily versions =
      Family("carryover_version_info", "1 for each version that is known.", MetricType::Gauge);
  MetricFamily shares =
      Family("carryover_version_share", "Per cent of a model's traffic that names no version.",
             MetricType::Gauge);
  for (const VersionInfo& info : engine_->ListVersions("")) {
    AddSample(&versions, 1,
              {{"model", info.model},
               {"version", info.version},
               {"role", info.share > 0 ? "serving" : info.state},
               {"weights_sha256", info.weights_sha256}});
    AddSample(&shares, info.share, {{"model", info.model}, {"version", info.version}});
  }
  all.push_back(std::move(versions));
  all.push_back(std::move(shares));
  all.push_back(Single("carryover_build_info", "1, with the version of the program.",
                       MetricType::Gauge, 1, {{"version", kBuildVersion}}));
  return all;
}

std::vector<MetricFamily> ProcessCollector::Collect() const {
  std::vector<MetricFamily> all;
  const std::string stat = ReadProc("/proc/self/stat");
  // The second field, the name, may hold spaces and ends with the last ')'.
  const size_t name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    const std::vector<std::string> fields = absl::StrSplit(stat.substr(name_end + 2), ' ');
    // Numbered as in proc(5), where the state is field 3.
    const auto field = [&](size_t number) {
      double value = 0;
      if (number - 3 < fields.size()) (void)absl::SimpleAtod(fields[number - 3], &value);
      return value;
    };
    const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    all.push_back(Single("process_cpu_seconds_total", "CPU time of the process.",
                         MetricType::Counter, (field(14) + field(15)) / ticks));
    all.push_back(Single("process_start_time_seconds", "When it started, in seconds since 1970.",
                         MetricType::Gauge, BootTime() + field(22) / ticks));
    all.push_back(Single("process_virtual_memory_bytes", "Virtual memory of the process.",
                         MetricType::Gauge, field(23)));
    all.push_back(Single("process_resident_memory_bytes", "Memory of the process.",
                         MetricType::Gauge,
                         field(24) * static_cast<double>(sysconf(_SC_PAGESIZE))));
    all.push_back(
        Single("process_threads", "Threads of the process.", MetricType::Gauge, field(20)));
  }
  all.push_back(
      Single("process_open_fds", "Open file descriptors.", MetricType::Gauge, OpenFiles()));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    all.push_back(Single("process_max_fds", "Limit of open file descriptors.", MetricType::Gauge,
                         static_cast<double>(limit.rlim_cur)));
  }
  return all;
}

}  // namespace carryover
