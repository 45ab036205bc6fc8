#!/usr/bin/env python3
"""Makes deploy/grafana/carryover.json, the dashboard of a canary that carries caches. Standard library only.

    deploy/grafana/make_dashboard.py           writes the file
    deploy/grafana/make_dashboard.py --print   prints it
"""

import json
import pathlib
import sys

import panels
from panels import heatmap, row, stat, state_timeline, steps, table, text, timeseries

# Choices of the dashboard: a server, and a cell of fidelity or of the gate.
I = 'instance=~"$instance"'
F = I + ', model=~"$model", source=~"$source", target=~"$target", task=~"$task"'
G = F + ', prefix_bucket=~"$prefix_bucket"'
RATE, WINDOW = "$__rate_interval", "$window"
CELL = "instance, model, source, target, plan, task, prefix_bucket, answer"

STATES = {1: ("open", "green"), 2: ("repaired", "super-light-green"), 3: ("learning", "blue"), 4: ("closed", "red")}
STATE_CODE = f"""sum by ({CELL}) (
    carryover_gate_state{{{G}, state="open"}} or carryover_gate_state{{{G}, state="repaired"}} * 2
    or carryover_gate_state{{{G}, state="learning"}} * 3 or carryover_gate_state{{{G}, state="closed"}} * 4)"""


def rate(metric, labels, by="", window=RATE):
    inner = f"rate({metric}{{{labels}}}[{window}])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q, metric, labels, by="", window=RATE):
    return f"histogram_quantile({q}, {rate(metric + '_bucket', labels, (by + ', le') if by else 'le', window)})"


def mean(metric, labels, by="", window=RATE):
    return f"{rate(metric + '_sum', labels, by, window)} / {rate(metric + '_count', labels, by, window)}"


def share(part, whole, labels, by="", window=WINDOW, part_labels=""):
    return f"{rate(part, labels + part_labels, by, window)} / {rate(whole, labels, by, window)}"


def quantiles(metric, labels, by, legend, window=RATE, which=(0.5, 0.95, 0.99)):
    return [(quantile(q, metric, labels, by, window), f"p{q * 100:g} {legend}".strip()) for q in which]


def at_a_glance():
    cells = lambda state: f'sum(carryover_gate_state{{{F}, state=~"{state}"}})'
    return row("At a glance", [
        stat("Provenance violations", "Carried caches that were taken for native ones. Must stay 0; anything else wakes somebody.",
             f"sum(carryover_provenance_violations_total{{{I}}})", thresholds=steps(("green", None), ("red", 1))),
        stat("Cells open", "Cells that are served from carried caches.", cells("open|repaired"),
             thresholds=steps(("green", None))),
        stat("Cells learning", "Nothing is proved yet: served natively, unless when_learning is CARRY.", cells("learning")),
        stat("Cells closed", "A measure was over its limit: served natively.", cells("closed"),
             thresholds=steps(("green", None), ("red", 1))),
        stat("Worst headroom", "The lowest distance of a lower bound to noise floor and limit, over all cells that are carried "
             "and all measures. Below 0 the gate should have closed the cell.",
             f"""min((carryover_gate_bound{{{F}, side="floor"}} + ignoring(side) carryover_gate_bound{{{F}, side="limit"}}
             - ignoring(side) carryover_gate_bound{{{F}, side="lower"}})
             and ignoring(measure, state) (carryover_gate_state{{{F}, state=~"open|repaired"}} == 1))""",
             "percentunit", thresholds=steps(("red", None), ("green", 0)), decimals=2),
        stat("Carried share", "Of prompt tokens, those read from another version's caches. Rises with an update, falls as the store "
             "heals.", share("carryover_prompt_tokens_total", "carryover_prompt_tokens_total", I, window=WINDOW,
                             part_labels=', source="carried"'), "percentunit", decimals=1),
        stat("Comparisons that complete", "Of sampled ones. Under half of them no cell opens.",
             f"""{rate("carryover_shadow_total", I + ', outcome="completed"', window=WINDOW)}
             / {rate("carryover_shadow_total", I + ', outcome!~"cancelled|version|draining"', window=WINDOW)}""",
             "percentunit", thresholds=steps(("red", None), ("orange", 0.5), ("green", 0.8)), decimals=0),
        stat("First token, native / carried", "Medians divided: how many times sooner a carried request answers. Their prompts may "
             "differ in length; the hold-outs below compare like with like.",
             f"""{quantile(0.5, "carryover_time_to_first_token_seconds", I + ', plan="native"', window=WINDOW)}
             / {quantile(0.5, "carryover_time_to_first_token_seconds", I + ', plan!="native"', window=WINDOW)}""",
             "none", decimals=1),
    ])


def rollout():
    return row("Rollout", [
        timeseries("Traffic by version", "Per cent of the requests that name no version. A canary is a small share of the new one.",
                   [(f'max by (model, version) (carryover_version_share{{{I}, model=~"$model"}})', "{{model}} {{version}}")],
                   "percent", stairs=True, stack="normal", low=0),
        table("Versions", "What each server knows. Weights that are unloaded leave their caches; equal sums are one version under "
              "two names.",
              [("share", f'sum by (instance, model, version) (carryover_version_share{{{I}, model=~"$model"}})', "percent", None),
               ("known", f"sum by (instance, model, version, role, weights_sha256) "
                         f'(carryover_version_info{{{I}, model=~"$model"}})', "none", None)],
              [], width=16, order=("model", "version", "role", "share", "instance")),
        state_timeline("State of the gate", "Each cell is a line: green is carried, blue learns (native), red is closed (native).",
                       STATE_CODE, "{{target}} over {{source}} {{task}} {{prefix_bucket}} {{answer}} {{instance}}", STATES),
        timeseries("Changes of state", "Since the server's start, by what caused them. Many of one kind: a cell that does not come to "
                   "rest.",
                   [(f"sum by (from, to, reason) (carryover_gate_transitions_total{{{I}}})", "{{from}} to {{to}}: {{reason}}")],
                   stairs=True, low=0),
        table("Cells", "What each cell stands on. It opens when every upper bound is below floor and limit together, and closes when a "
              "lower bound is above.",
              [("state", STATE_CODE, "none", STATES),
               ("forced", f"sum by ({CELL}) (carryover_gate_forced{{{G}}})", "none", {0: ("", "text"), 1: ("yes", "orange")}),
               ("n", f"sum by ({CELL}) (carryover_gate_samples{{{G}}})", "none", None),
               ("dropped", f"sum by ({CELL}) (carryover_gate_dropped{{{G}}})", "none", None),
               *[(f"{measure} {side}", f'sum by ({CELL}) (carryover_gate_bound{{{G}, measure="{measure}", side="{side}"}})',
                  "percentunit", None) for measure in ("flip", "tv", "stop") for side in ("mean", "lower", "upper")]],
              ["model"], width=16, order=("source", "target", "task", "prefix_bucket", "answer", "plan", "instance")),
    ])


def reuse():
    by_reason = lambda metric: (f"sum by (reason) (rate({metric}{{{I}}}[{RATE}]))", "{{reason}}")
    return row("Reuse and refusals", [
        timeseries("Where prompt tokens come from", "Cached: the version's own; carried: another version's; computed: from nothing. After "
                   "an update carried takes the place of cached, and gives it back.",
                   [(rate("carryover_prompt_tokens_total", I, "source"), "{{source}}")], "none", stack="percent"),
        timeseries("Carried share by server", "The alert CarryoverCarriedShareStuck looks at this: it has to fall in hours.",
                   [(f"instance:carryover_prompt_tokens_carried:ratio_rate1h{{{I}}}", "{{instance}}")], "percentunit", low=0),
        timeseries("Tokens found in the store", "By who computed them and where they lay. “T over S” was computed by T while it read "
                   "caches of S: it serves only the same conversation.",
                   [(rate("carryover_store_hit_tokens_total", I, "provenance, tier"), "{{provenance}} ({{tier}})")], "none",
                   stack="normal"),
        timeseries("The store", "Bytes by who computed them. The source's part shrinks as the target's own grows.",
                   [(f'sum by (provenance, tier) (carryover_store_bytes{{{I}, model=~"$model"}})', "{{provenance}} ({{tier}})")],
                   "bytes", stack="normal"),
        timeseries("Carried prefixes healed", "Native blocks that comparisons left where carried ones had served.",
                   [(rate("carryover_refresh_blocks_total", I), "blocks a second")], "none", low=0),
        timeseries("Blocks that left a tier", "Capacity: the oldest goes. Budget: one version had more than its part. A move to the next "
                   "tier counts.",
                   [(rate("carryover_store_evictions_total", I, "tier, reason"), "{{tier}}: {{reason}}")], "none", low=0),
        timeseries("Requests refused", "Before they were queued, a second. By reason: the queue is full by requests or by tokens, or the "
                   "server drains.", [by_reason("carryover_requests_rejected_total")], "reqps", low=0),
        timeseries("Blocks refused", "Failed a check and were computed again. Corrupt, lost or transfer: look at the machine. Violation: "
                   "the provenance law; must stay 0.", [by_reason("carryover_store_rejects_total")], "none", low=0),
        timeseries("Decisions without a cell", "The gate or the series had no room: such requests are served natively, such samples are "
                   "not shown.",
                   [(rate("carryover_gate_refused_total", I), "of the gate"),
                    (rate("carryover_fidelity_samples_without_cell_total", I), "samples")], "none", low=0),
    ])


def first_token():
    ttft, part, trial = ("carryover_time_to_first_token_seconds", "carryover_first_token_part_seconds",
                         "carryover_trial_time_to_first_token_seconds")
    parts = [(f"""{rate(part + "_sum", I + f', part="{name}"', "plan", WINDOW)}
              / {rate(part + "_count", I + f', part="{name}"', "plan", WINDOW)}""", "{{plan}}: " + name)
             for name in ("queue", "load", "compute")]
    return row("Time to first token", [
        *[timeseries(f"First token, p{q * 100:g}", "Native against carried (direct), as users see it, with queue and block load.",
                     [(quantile(q, ttft, I, "plan"), "{{plan}}")], "s", low=0) for q in (0.5, 0.95, 0.99)],
        timeseries("Where the time goes", "The mean time to first token in its parts, which add up. Load is waiting for blocks of a slower "
                   "tier: what is left of carrying when it grows is little.", parts, "s", low=0),
        timeseries("First token without block load, p95", "The compute part alone: what the caches save when they lie on the device.",
                   [(quantile(0.95, part, I + ', part="compute"', "plan"), "{{plan}}")], "s", low=0),
        timeseries("Block load", "Waiting for blocks of a slower tier, of requests that had some there.",
                   quantiles("carryover_block_load_seconds", I, "tier", "{{tier}}"), "s", low=0),
        timeseries("Like with like: first token by arm", "Of requests that the gate would carry, a random few are held out and served "
                   "natively. The difference is what carrying is worth, whatever the prompts.",
                   quantiles(trial, F, "arm", "{{arm}}", WINDOW, (0.5, 0.95)), "s", low=0),
        timeseries("Allowance burnt", "Of first tokens over 2.5 s, in units of the 1 % that may be. 1 is what the objective allows; the alerts "
                   "are at 14.4 (1 h) and 6 (6 h).",
                   [("job:carryover_ttft_slow:ratio_rate1h / 0.01", "1 h"), ("job:carryover_ttft_slow:ratio_rate6h / 0.01", "6 h")],
                   "none", low=0, thresholds=steps(("transparent", None), ("orange", 6), ("red", 14.4))),
        timeseries("Between tokens", "Of all requests: comparisons in the background must not show here.",
                   quantiles("carryover_inter_token_latency_seconds", I, "", ""), "s", low=0),
    ])


def fidelity():
    samples, flips, kl = "carryover_fidelity_samples_total", "carryover_first_token_flips_total", "carryover_fidelity_kl_nats"
    pair = "comparison, along"
    both, first = "{{comparison}} along {{along}}", G + ', positions="1"'
    bounds = lambda measure: timeseries(
        f"Gate: {measure}", "Mean and anytime-valid bounds of each cell against its line, noise floor and limit together. It opens when "
        "the upper bound falls below the line, closes when the lower one rises above it. Choose a task and a prefix length.",
        [(f'carryover_gate_bound{{{G}, measure="{measure}", side=~"mean|lower|upper"}}', "{{side}} {{task}} {{prefix_bucket}} {{answer}}"),
         (f"""carryover_gate_bound{{{G}, measure="{measure}", side="floor"}}
          + ignoring(side) carryover_gate_bound{{{G}, measure="{measure}", side="limit"}}""",
          "line {{task}} {{prefix_bucket}} {{answer}}")], "percentunit", low=0)
    split = lambda by, legend: [(f"{rate(flips, G, by + ', comparison', WINDOW)} / {rate(samples, G, by + ', comparison', WINDOW)}",
                                 legend + " {{comparison}}")]
    return row("Fidelity: carried against native", [
        *[timeseries(f"KL p{q * 100:g}", "Nats, a value a position. Control is the noise floor (native against native): carried is to be judged "
                     "by its distance from that. Old is the source's own answer: carried should lie far below.",
                     [(quantile(q, kl, G, pair, WINDOW), both)], "none", log=True) for q in (0.5, 0.95, 0.99)],
        *[timeseries(f"KL p95 of the first token by {label}", "Where it rises with the length of the prefix or for one task alone, that is where "
                     "carrying bends.", [(quantile(0.95, kl, first, by + ", comparison", WINDOW), legend + " {{comparison}}")], "none",
                     log=True)
          for by, label, legend in (("prefix_bucket", "prefix length", "{{prefix_bucket}}"), ("task", "task", "{{task}}"))],
        timeseries("KL p95 by position", "Positions of the answer: 1, 2 to 4, 5 to 16.",
                   [(quantile(0.95, kl, G, pair + ", positions", WINDOW), "{{positions}} " + both)], "none", log=True),
        timeseries("First-token flips", "Of samples, those whose first token would have been another. Control is the floor.",
                   [(share(flips, samples, G, "comparison"), "{{comparison}}")], "percentunit", low=0),
        timeseries("First-token flips by prefix length", "The same by tokens of prefix, rounded down.", split("prefix_bucket", "{{prefix_bucket}}"),
                   "percentunit", low=0),
        timeseries("First-token flips by task", "The same by task: one that stands out should have a cell of its own.", split("task", "{{task}}"), "percentunit", low=0),
        timeseries("Flips by position", "Of compared positions, along the text of the arm that is named.",
                   [(share("carryover_position_flips_total", "carryover_fidelity_positions_total", G, pair + ", positions"),
                     "{{positions}} " + both)], "percentunit", low=0),
        timeseries("Total variation", "Mean over positions: the share of probability that sits elsewhere.",
                   [(mean("carryover_fidelity_tv", G, pair, WINDOW), both)], "percentunit", low=0),
        timeseries("Jensen-Shannon, top-10 overlap", "Mean JS in nats (at most 0.69) and the mean share of the ten likeliest tokens that both "
                   "arms have.",
                   [(mean("carryover_fidelity_js_nats", G, "comparison", WINDOW), "JS {{comparison}}"),
                    (mean("carryover_fidelity_topk_overlap", G, "comparison", WINDOW), "overlap {{comparison}}")], "none", low=0),
        bounds("flip"), bounds("tv"), bounds("stop"),
        timeseries("Noise floor of the last 6 hours", "Native against native, recorded. It should not move; the alerts CarryoverNoiseFloorHigh "
                   "and CarryoverNoiseFloorRisen look at it.",
                   [('target:carryover_noise_floor:rate6h{model=~"$model", target=~"$target"}', "{{target}} {{measure}}")], "none", low=0),
        timeseries("Distance to the line, worst cell", "The highest of lower bound less floor and limit. Above 0 the gate closes.",
                   [(f"""max by (measure) (carryover_gate_bound{{{G}, side="lower"}} - ignoring(side)
                     (carryover_gate_bound{{{G}, side="floor"}} + ignoring(side) carryover_gate_bound{{{G}, side="limit"}}))""",
                     "{{measure}}")], "percentunit", thresholds=steps(("transparent", None), ("red", 0))),
        timeseries("Recovered fidelity", "1 less KL(native, carried) over KL(native, old), of the means of first tokens: 1 is the target itself, 0 no "
                   "better than the old version.",
                   [(f"""1 - ({mean(kl, first + ', comparison="carried", along="native"', "target", WINDOW)})
                     / ({mean(kl, first + ', comparison="old", along="native"', "target", WINDOW)})""", "{{target}}")],
                   "percentunit", high=1),
    ])


def margins():
    carried = G + ', comparison="carried"'
    increase = lambda metric, more="": f"sum by (le) (increase({metric}_bucket{{{carried}{more}}}[{RATE}]))"
    return row("Margins: how near another answer was", [
        heatmap("Margin of the native answer", "Lead of the first choice over the next token, in logits. Mass near 0: small changes flip it, "
                "whatever their cause.", increase("carryover_answer_margin_nats", ', path="native"')),
        heatmap("The same answer's margin, carried", "The lowest row is below 0: there another token leads, which is a flip.",
                increase("carryover_answer_margin_nats", ', path="carried"')),
        heatmap("Shift of the margin", "Carried less native. Centred on 0 it is noise; a lean to below 0 is a bend.",
                increase("carryover_answer_margin_shift_nats")),
        timeseries("Fragile positions", "Logits moved by more than the native margin: a flip was within reach, whether or not it came.",
                   [(share("carryover_fragile_total", "carryover_fidelity_positions_total", G, "comparison"), "{{comparison}}")],
                   "percentunit", width=12, low=0),
        timeseries("Median margin", "Of the native first choice, in both arms.",
                   [(quantile(0.5, "carryover_answer_margin_nats", carried, "path", WINDOW), "{{path}}")], "none", width=12),
    ])


def answers():
    length, ended = "carryover_trial_answer_tokens", "carryover_trial_finished_total"
    return row("Answers: stops and length", [
        timeseries("Stop disagreements", "Of greedy samples where both stops are known, those where the arms stop elsewhere.",
                   [(share("carryover_stop_disagreements_total", "carryover_stops_compared_total", G, "comparison"), "{{comparison}}")],
                   "percentunit", low=0),
        timeseries("Shift of the stop probability", "Mean difference of P(stop) between the arms, a value a position.",
                   [(mean("carryover_fidelity_stop_shift", G, "comparison", WINDOW), "{{comparison}}")], "percentunit", low=0),
        timeseries("How far the arms agree", "Greedy samples: the same to the end, the same as far as was compared, diverged.",
                   [(rate("carryover_continuation_match_total", G + ', comparison="carried"', "match", WINDOW), "{{match}}")],
                   "none", stack="percent"),
        timeseries("Length: carried against held out", "Mean tokens of whole answers, by random assignment: the lines should lie on each other.",
                   [(mean(length, G, "arm", WINDOW), "{{arm}}")], "none", low=0),
        timeseries("Length drift", "Carried less held out, over held out, by task. The gate does not judge it; the alert "
                   "CarryoverAnswerLengthDrift looks at a day.",
                   [(f"""({mean(length, G + ', arm="carried"', "task", WINDOW)})
                     / ({mean(length, G + ', arm="held_out"', "task", WINDOW)}) - 1""", "{{task}}")], "percentunit"),
        timeseries("How answers end", "By arm: the shares of stop token, stop string and length should agree.",
                   [(f"""{rate(ended, G, "arm, reason", WINDOW)} / on (arm) group_left () {rate(ended, G, "arm", WINDOW)}""",
                     "{{arm}}: {{reason}}")], "percentunit", low=0, high=1),
    ])


def shadows():
    done = lambda by: rate("carryover_shadow_total", I + ', outcome="completed"', by)
    return row("Shadows: what the measures stand on", [
        timeseries("Comparisons", "Arms that were computed beside users' requests, a second: the carried one where native served and the other way "
                   "round, native once more (control), the source's answer (old).", [(done("arm"), "{{arm}}")], "none", low=0),
        timeseries("Dropped", "By reason. What is dropped counts as the worst where a cell would open. docs/runbook.md says what to do about each.",
                   [(rate("carryover_shadow_total", I + ', outcome!="completed"', "outcome"), "{{outcome}}")], "none", low=0),
        timeseries("Samples by cell", "Completed comparisons of the gate's epoch: it takes some 200 good ones to open a cell.",
                   [(f"carryover_gate_samples{{{G}}}", "{{target}} over {{source}} {{task}} {{prefix_bucket}} {{answer}}")], "none", low=0),
        timeseries("Waiting", "Requests that wait for, or are in, their comparison.",
                   [(f"sum by (instance) (carryover_shadows_waiting{{{I}}})", "{{instance}}")], "none", low=0),
        timeseries("Lag", "From a request's end to the start of its comparison; after max_age_seconds (60) it is dropped.",
                   quantiles("carryover_shadow_lag_seconds", I, "", ""), "s", low=0),
        timeseries("Cost", "Tokens computed in the background, as a share of those that users' requests computed.",
                   [(f"""{rate("carryover_shadow_tokens_total", I, window=WINDOW)}
                     / ({rate("carryover_prompt_tokens_total", I + ', source="computed"', window=WINDOW)}
                     + {rate("carryover_generation_tokens_total", I, window=WINDOW)})""", "of users' tokens")], "percentunit", low=0),
        timeseries("Samples a window", "What the lines of Fidelity stand on: under some dozens they say little.",
                   [(f"sum by (comparison) (increase(carryover_fidelity_samples_total{{{G}}}[{WINDOW}]))", "{{comparison}}")], "none", low=0),
        timeseries("Invalid samples", "Logits that are no distribution. Must stay 0.",
                   [(f"sum by (comparison) (increase(carryover_fidelity_invalid_samples_total{{{G}}}[{WINDOW}]))", "{{comparison}}")],
                   "none", low=0),
        timeseries("Room for cells", "Of the cells that may have series.",
                   [(f"carryover_fidelity_cells{{{I}}} / carryover_fidelity_cells_limit{{{I}}}", "{{instance}}")], "percentunit", low=0, high=1),
    ])


def server():
    return row("Server", [
        timeseries("Calls", "gRPC calls a second, by status.", [(rate("carryover_requests_total", I, "method, code"), "{{method}} {{code}}")],
                   "reqps", low=0),
        timeseries("Requests", "In a step and in the queue.",
                   [(f"sum(carryover_requests_running{{{I}}})", "running"), (f"sum(carryover_requests_waiting{{{I}}})", "waiting")],
                   "none", low=0),
        timeseries("Waiting in the queue", "From accepting a request to its first step.", quantiles("carryover_queue_seconds", I, "", ""),
                   "s", low=0),
        timeseries("Tokens", "A second: prompt tokens that were computed, and generated ones.",
                   [(rate("carryover_prompt_tokens_total", I + ', source="computed"'), "prompt"),
                    (rate("carryover_generation_tokens_total", I), "generated")], "none", low=0),
        timeseries("KV blocks", "On the device. Used ones may be caches; active ones belong to running requests alone.",
                   [(f"sum by (instance) (carryover_device_blocks{{{I}}})", "there are {{instance}}"),
                    (f"sum by (instance) (carryover_device_blocks_used{{{I}}})", "used {{instance}}"),
                    (f"sum by (instance) (carryover_device_blocks_active{{{I}}})", "active {{instance}}")], "none", low=0),
        timeseries("Preemptions", "Sequences that gave their blocks up and are computed again.",
                   [(rate("carryover_preemptions_total", I), "a second")], "none", low=0),
        timeseries("CPU", "Cores in use by each server.", [(rate("process_cpu_seconds_total", I + ', job="carryover"', "instance"), "{{instance}}")], "none", low=0),
        timeseries("Memory", "Resident memory of each server.", [(f'process_resident_memory_bytes{{{I}, job="carryover"}}', "{{instance}}")], "bytes", low=0),
        timeseries("Build", "The program's version on each server, and when it started.",
                   [(f"carryover_build_info{{{I}}}", "{{instance}} {{version}}"),
                    (f'(time() - process_start_time_seconds{{{I}, job="carryover"}}) / 3600', "hours up {{instance}}")], "none", low=0),
    ], collapsed=True)


def make():
    cell = f'carryover_fidelity_samples_total{{model=~"$model"}}'
    variables = [
        panels.datasource_variable(),
        panels.label_variable("instance", "Server", "carryover_build_info"),
        panels.label_variable("model", "Model", "carryover_version_info"),
        panels.label_variable("source", "Source", cell),
        panels.label_variable("target", "Target", cell),
        panels.label_variable("task", "Task", cell),
        panels.label_variable("prefix_bucket", "Prefix", cell),
        panels.choice_variable("window", "Window of fidelity", ["15m", "1h", "6h", "1d"], "1h"),
    ]
    guide = text("A **source** is the version whose caches are carried, a **target** the one that reads them. Judge *carried* by its distance from "
                 "*control* (native against native), never by itself; fidelity's lines are rates over *Window of fidelity*. "
                 "What each alert means and what to do: `docs/runbook.md`.", 2)
    first = at_a_glance()
    first["panels"].append(guide)
    return panels.dashboard(
        "carryover-canary", "carryover: canary", "A model update that is served from the caches of the version before it: what it saves, what it "
        "bends, what the gate makes of it.", ["carryover", "inference"], variables,
        [first, rollout(), reuse(), first_token(), fidelity(), margins(), answers(), shadows(), server()])


def main():
    made = json.dumps(make(), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(made)
    else:
        pathlib.Path(__file__).with_name("carryover.json").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
