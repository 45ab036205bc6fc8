#include "client/eval/report.h"

namespace carryover::eval {

std::string ReportToHtml(const Report& report) { return "<!doctype html><title>eval</title>"; }

}  // namespace carryover::eval
