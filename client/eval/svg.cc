#include "client/eval/svg.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace carryover::eval {
namespace {

constexpr double kWidth = 420, kHeight = 270;
constexpr double kLeft = 52, kRight = 14, kTop = 10, kBottom = 42;

struct Frame {
  double height = kHeight;
  double left() const { return kLeft; }
  double right() const { return kWidth - kRight; }
  double top() const { return kTop; }
  double bottom() const { return height - kBottom; }
};

// 1, 2 or 5 times a power of ten, so that about `count` steps cover the range.
double NiceStep(double range, int count) {
  const double raw = range / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

std::string Tick(double value, bool percent, const std::string& unit) {
  if (unit == " ms" && value >= 1000) return absl::StrFormat("%.3g s", value / 1000);
  return percent ? absl::StrFormat("%.3g %%", 100 * value)
                 : absl::StrCat(absl::StrFormat("%.3g", value), unit);
}

std::string Open(const std::string& title, double height) {
  return absl::StrFormat("<svg viewBox=\"0 0 %.0f %.0f\" role=\"img\" aria-label=\"%s\">", kWidth,
                         height, EscapeHtml(title));
}

void Line(std::string* out, double x1, double y1, double x2, double y2, const char* classes) {
  absl::StrAppendFormat(out, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>",
                        x1, y1, x2, y2, classes);
}

void Text(std::string* out, double x, double y, const char* anchor, const std::string& text,
          const char* more = "") {
  absl::StrAppendFormat(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>", x, y,
                        anchor, more, EscapeHtml(text));
}

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 32 || c == '\n' || c == '\t') out += c;
    }
  }
  return out;
}

std::string DrawLines(const LineChart& chart) {
  const Frame frame;
  std::vector<double> xs;
  double top = chart.least_top, low = 0;
  bool first = true;
  for (const ChartSeries& series : chart.series) {
    for (const ChartPoint& point : series.points) {
      xs.push_back(point.x);
      top = std::max({top, point.y, point.upper});
      if (chart.log_y && point.y > 0) low = first ? point.y : std::min(low, point.y);
      first = false;
    }
  }
  if (xs.empty()) return "<p class=\"quiet\">nothing to draw</p>";
  if (chart.limit) top = std::max(top, *chart.limit * 1.2);
  if (chart.most_top > 0) top = std::min(top, chart.most_top);
  if (top <= 0) top = 1;
  std::sort(xs.begin(), xs.end());
  xs.erase(std::unique(xs.begin(), xs.end()), xs.end());
  const double x_low = std::log2(xs.front()) - 0.3, x_high = std::log2(xs.back()) + 0.3;

  const double log_low = chart.log_y ? std::floor(std::log10(std::max(low, 1e-9))) : 0;
  const double log_high = chart.log_y ? std::max(log_low + 1, std::ceil(std::log10(top))) : 0;
  const double step = NiceStep(top, 5);
  const double y_top = chart.most_top > 0 ? std::min(chart.most_top, std::ceil(top / step) * step)
                                          : std::ceil(top / step) * step;
  const auto at_x = [&](double x) {
    return frame.left() +
           (std::log2(x) - x_low) / (x_high - x_low) * (frame.right() - frame.left());
  };
  const auto at_y = [&](double y) {
    const double share =
        chart.log_y ? (std::log10(std::max(y, 1e-9)) - log_low) / (log_high - log_low) : y / y_top;
    return frame.bottom() - std::clamp(share, 0.0, 1.0) * (frame.bottom() - frame.top());
  };

  std::string out = Open(chart.title, frame.height);
  if (chart.log_y) {
    for (double power = log_low; power <= log_high; ++power) {
      const double y = std::pow(10, power);
      Line(&out, frame.left(), at_y(y), frame.right(), at_y(y), "grid");
      Text(&out, frame.left() - 5, at_y(y) + 4, "end", Tick(y, chart.percent, chart.unit));
    }
  } else {
    for (double y = 0; y <= y_top * 1.0001; y += step) {
      Line(&out, frame.left(), at_y(y), frame.right(), at_y(y), "grid");
      Text(&out, frame.left() - 5, at_y(y) + 4, "end", Tick(y, chart.percent, chart.unit));
    }
  }
  for (const double x : xs) {
    Line(&out, at_x(x), frame.bottom(), at_x(x), frame.bottom() + 4, "axis");
    Text(&out, at_x(x), frame.bottom() + 17, "middle", absl::StrCat(static_cast<int64_t>(x)));
  }
  Line(&out, frame.left(), frame.bottom(), frame.right(), frame.bottom(), "axis");
  Text(&out, (frame.left() + frame.right()) / 2, frame.height - 6, "middle", chart.x_label);
  if (chart.limit) {
    Line(&out, frame.left(), at_y(*chart.limit), frame.right(), at_y(*chart.limit), "limit");
  }
  // Series of the same x stand a little apart, so that no whisker hides another.
  const double count = static_cast<double>(chart.series.size());
  for (size_t s = 0; s < chart.series.size(); ++s) {
    const ChartSeries& series = chart.series[s];
    const double aside = 3.0 * (static_cast<double>(s) - (count - 1) / 2);
    std::string path;
    for (const ChartPoint& point : series.points) {
      absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : "L", at_x(point.x) + aside,
                            at_y(point.y));
    }
    absl::StrAppendFormat(&out, "<path d=\"%s\" class=\"line c%d%s\"/>", path, series.color,
                          series.dashed ? " dashed" : "");
    for (const ChartPoint& point : series.points) {
      const double x = at_x(point.x) + aside;
      if (point.lower < point.y || point.upper > point.y) {
        absl::StrAppendFormat(&out, "<path d=\"M%.1f %.1fV%.1f\" class=\"whisker c%d\"/>", x,
                              at_y(point.lower), at_y(point.upper), series.color);
      }
      absl::StrAppendFormat(&out,
                            "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" class=\"dot c%d\"><title>%s"
                            "</title></circle>",
                            x, at_y(point.y), series.color, EscapeHtml(point.tip));
    }
  }
  return out + "</svg>";
}

std::string DrawScatter(const std::string& title, const std::string& x_label,
                        const std::string& y_label, const std::vector<ScatterPoint>& points) {
  Frame frame;
  frame.height = 400;
  if (points.empty()) return "<p class=\"quiet\">no labelled answers</p>";
  double low = 0, high = 1;
  for (const ScatterPoint& point : points) {
    low = std::min({low, point.x, point.y});
    high = std::max({high, point.x, point.y});
  }
  const double step = NiceStep(high - low, 7);
  low = std::floor(low / step) * step;
  high = std::ceil(high / step) * step;
  const auto at_x = [&](double x) {
    return frame.left() + (x - low) / (high - low) * (frame.right() - frame.left());
  };
  const auto at_y = [&](double y) {
    return frame.bottom() - (y - low) / (high - low) * (frame.bottom() - frame.top());
  };
  std::string out = Open(title, frame.height);
  for (double tick = low; tick <= high + step / 2; tick += step) {
    Line(&out, frame.left(), at_y(tick), frame.right(), at_y(tick), "grid");
    Line(&out, at_x(tick), frame.top(), at_x(tick), frame.bottom(), "grid");
    const std::string label = Tick(std::fabs(tick) < step / 100 ? 0 : tick, false, "");
    Text(&out, frame.left() - 5, at_y(tick) + 4, "end", label);
    Text(&out, at_x(tick), frame.bottom() + 16, "middle", label);
  }
  Line(&out, frame.left(), at_y(0), frame.right(), at_y(0), "axis");
  Line(&out, at_x(0), frame.top(), at_x(0), frame.bottom(), "axis");
  Line(&out, at_x(low), at_y(low), at_x(high), at_y(high), "limit");
  Text(&out, (frame.left() + frame.right()) / 2, frame.height - 6, "middle", x_label);
  const double middle = (frame.top() + frame.bottom()) / 2;
  Text(&out, 12, middle, "middle", y_label,
       absl::StrFormat(" transform=\"rotate(-90 12 %.1f)\"", middle).c_str());
  for (const ScatterPoint& point : points) {
    absl::StrAppendFormat(&out,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.2\" class=\"dot thin c%d\"><title>"
                          "%s</title></circle>",
                          at_x(point.x), at_y(point.y), point.color, EscapeHtml(point.tip));
  }
  return out + "</svg>";
}

std::string DrawTradeOffs(const std::string& title, const std::string& y_label,
                          std::optional<double> limit, const std::vector<TradeOff>& points) {
  const Frame frame;
  double low = std::numeric_limits<double>::infinity(), high = 0, top = 0;
  for (const TradeOff& point : points) {
    if (point.ms <= 0) continue;
    low = std::min(low, point.ms);
    high = std::max(high, point.ms);
    top = std::max({top, point.y, point.upper});
  }
  if (high == 0) return "<p class=\"quiet\">nothing to draw</p>";
  // Room on the right, where the slowest one's name stands.
  const double x_low = std::log10(low) - 0.1, x_high = std::log10(high) + 0.45;
  if (limit) top = std::max(top, *limit * 1.2);
  const double step = NiceStep(std::max(top, 0.01), 5);
  const double y_top = std::ceil(std::max(top, 0.01) / step) * step;
  const auto at_x = [&](double ms) {
    return frame.left() +
           (std::log10(ms) - x_low) / (x_high - x_low) * (frame.right() - frame.left());
  };
  const auto at_y = [&](double y) {
    return frame.bottom() - y / y_top * (frame.bottom() - frame.top());
  };
  std::string out = Open(title, frame.height);
  for (double y = 0; y <= y_top * 1.0001; y += step) {
    Line(&out, frame.left(), at_y(y), frame.right(), at_y(y), "grid");
    Text(&out, frame.left() - 5, at_y(y) + 4, "end", Tick(y, /*percent=*/true, ""));
  }
  for (double power = std::floor(x_low); power <= x_high; ++power) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double ms = factor * std::pow(10, power);
      if (std::log10(ms) < x_low || std::log10(ms) > x_high) continue;
      Line(&out, at_x(ms), frame.bottom(), at_x(ms), frame.bottom() + 4, "axis");
      Text(&out, at_x(ms), frame.bottom() + 17, "middle", Tick(ms, false, " ms"));
    }
  }
  Line(&out, frame.left(), frame.bottom(), frame.right(), frame.bottom(), "axis");
  if (limit) Line(&out, frame.left(), at_y(*limit), frame.right(), at_y(*limit), "limit");
  Text(&out, (frame.left() + frame.right()) / 2, frame.height - 6, "middle",
       absl::StrCat("time to first token; up: ", y_label));
  for (const TradeOff& point : points) {
    if (point.ms <= 0) continue;
    if (point.lower < point.y || point.upper > point.y) {
      absl::StrAppendFormat(&out, "<path d=\"M%.1f %.1fV%.1f\" class=\"whisker c%d\"/>",
                            at_x(point.ms), at_y(point.lower), at_y(point.upper), point.color);
    }
    absl::StrAppendFormat(&out,
                          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" class=\"dot c%d\"><title>%s: "
                          "%.4g %% in %.4g ms</title></circle>",
                          at_x(point.ms), at_y(point.y), point.color, EscapeHtml(point.name),
                          100 * point.y, point.ms);
    Text(&out, at_x(point.ms) + 7, at_y(point.y) - 4, "start", point.name);
  }
  return out + "</svg>";
}

std::string DrawBars(const BarChart& chart) {
  const Frame frame;
  if (chart.groups.empty()) return "<p class=\"quiet\">nothing to draw</p>";
  double low = 0, high = chart.line.value_or(0);
  for (const Bars& group : chart.groups) {
    for (const Bar& bar : group.bars) {
      low = std::min({low, bar.value, bar.lower});
      high = std::max({high, bar.value, bar.upper});
    }
  }
  if (high - low < 1e-6) high = low + 1e-6;
  const double step = NiceStep(high - low, 5);
  const double y_low = std::floor(low / step) * step, y_high = std::ceil(high / step) * step;
  const auto at_y = [&](double y) {
    return frame.bottom() - (y - y_low) / (y_high - y_low) * (frame.bottom() - frame.top());
  };
  std::string out = Open(chart.title, frame.height);
  for (double y = y_low; y <= y_high + step / 2; y += step) {
    Line(&out, frame.left(), at_y(y), frame.right(), at_y(y), "grid");
    Text(&out, frame.left() - 5, at_y(y) + 4, "end",
         Tick(std::fabs(y) < step / 100 ? 0 : y, false, ""));
  }
  if (chart.line)
    Line(&out, frame.left(), at_y(*chart.line), frame.right(), at_y(*chart.line), "limit");
  const double count = static_cast<double>(chart.groups.size());
  const double each = (frame.right() - frame.left()) / count;
  const double wide = 0.8 * each / static_cast<double>(std::max<size_t>(chart.colors.size(), 1));
  size_t longest = 1;
  for (const Bars& group : chart.groups) longest = std::max(longest, group.name.size());
  // Names that would run into one another are thinned out.
  const auto every = std::max<size_t>(1, static_cast<size_t>(std::ceil(6.5 * longest / each)));
  for (size_t g = 0; g < chart.groups.size(); ++g) {
    const Bars& group = chart.groups[g];
    const double left = frame.left() + (static_cast<double>(g) + 0.1) * each;
    for (size_t b = 0; b < std::min(group.bars.size(), chart.colors.size()); ++b) {
      const Bar& bar = group.bars[b];
      const double x = left + static_cast<double>(b) * wide;
      const double top = at_y(std::max(bar.value, 0.0)), bottom = at_y(std::min(bar.value, 0.0));
      absl::StrAppendFormat(&out,
                            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\""
                            "dot c%d\"><title>%s</title></rect>",
                            x, top, wide * 0.92, bottom - top, chart.colors[b],
                            EscapeHtml(bar.tip));
      if (bar.lower < bar.value || bar.upper > bar.value) {
        absl::StrAppendFormat(&out, "<path d=\"M%.1f %.1fV%.1f\" class=\"axis\"/>", x + wide * 0.46,
                              at_y(bar.lower), at_y(bar.upper));
      }
    }
    if (g % every == 0) {
      Text(&out, left + 0.4 * each, frame.bottom() + 17, "middle", group.name);
    }
  }
  Line(&out, frame.left(), at_y(0), frame.right(), at_y(0), "axis");
  return out + "</svg>";
}

std::string DrawLegend(const std::vector<LegendEntry>& entries) {
  std::string out = "<p class=\"legend\">";
  for (const LegendEntry& entry : entries) {
    absl::StrAppendFormat(&out,
                          "<span><svg viewBox=\"0 0 22 10\" class=\"key\"><path d=\"M1 5H21\" "
                          "class=\"line c%d%s\"/><circle cx=\"11\" cy=\"5\" r=\"3.5\" class=\"dot "
                          "c%d\"/></svg> %s</span> ",
                          entry.color, entry.dashed ? " dashed" : "", entry.color,
                          EscapeHtml(entry.name));
  }
  return out + "</p>";
}

}  // namespace carryover::eval
