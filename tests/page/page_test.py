"""The status page in a real browser, with a real server, an update and traffic behind it.

    page_test.py FOLDER-WITH-THE-PROGRAMS [unittest's arguments]

Needs Debian's Chromium and playwright (scripts/setup); is skipped without them, and fails then where CI=true.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest

import live_server
from live_server import buckets, quantile, samples

CHROMIUM = shutil.which("chromium")
try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    sync_playwright = None

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
PROGRAMS = None
BROWSER = None

# Contrast of every piece of text with what is behind it, by WCAG 2: {text, ratio, large}.
CONTRASTS = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const all = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest('svg, script, noscript')) continue;
    const style = getComputedStyle(node);
    const [a, b] = [luminance(channels(style.color)), luminance(behind(node))].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    all.push({ text: walker.currentNode.textContent.trim().slice(0, 40), ratio: (a + 0.05) / (b + 0.05),
               large: size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) });
  }
  return all;
}"""


def digits(text):
    return int(re.sub(r"\D", "", text))


def shown_seconds(text):
    number, unit = text.split()
    return float(number) / {"ms": 1000, "s": 1}[unit]


def setUpModule():
    global BROWSER
    missing = [name for name, there in (("chromium", CHROMIUM), ("playwright", sync_playwright)) if not there]
    if missing:
        if os.environ.get("CI") == "true":
            raise AssertionError(f"missing: {missing}")
        raise unittest.SkipTest(f"missing: {missing}")
    playwright = sync_playwright().start()
    unittest.addModuleCleanup(playwright.stop)
    # As root Chromium needs to be told that it runs without a sandbox; it only sees our own page.
    BROWSER = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    unittest.addModuleCleanup(BROWSER.close)


class InABrowser(unittest.TestCase):
    """The tests of a class share a server, that the class has begun."""

    @classmethod
    def begin(cls, fidelity, cache=""):
        cls.folder = tempfile.mkdtemp(prefix="carryover-page-test-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.server = live_server.LiveServer(PROGRAMS, cls.folder, f"{fidelity} max_queue: 4096 max_age_seconds: 600", cache)
        cls.addClassCleanup(lambda: cls.server.stop())

    def open(self, **context):
        """A page whose errors, violations of the policy and requests elsewhere fail the test at its end."""
        context = BROWSER.new_context(**{"viewport": DESKTOP, **context})
        self.addCleanup(context.close)
        page = context.new_page()
        self.said, self.asked = [], []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        context.add_init_script("window.broken = [];"
                                "addEventListener('securitypolicyviolation', (e) => broken.push(e.violatedDirective));")
        page.goto(self.server.url)
        return page

    def show(self, **context):
        page = self.open(**context)
        expect(page.locator("#live")).to_be_visible()
        return page

    def answer(self, page, data):
        """The page gets this from its next question on."""
        page.route("**/status.json", lambda route: route.fulfill(json=data))

    def wait_quiet(self):
        deadline = time.monotonic() + 60
        while self.server.status()["shadows"]["waiting"] > 0:
            self.assertLess(time.monotonic(), deadline, "shadows do not end")
            time.sleep(0.3)
        time.sleep(1.2)  # the longest that an answer, or the gate's rows, may be old

    def let_it_ask(self, page):
        """The page shows what is true now, by asking as it always does."""
        self.wait_quiet()
        page.evaluate("0")  # answers that came meanwhile are no news
        with page.expect_response("**/status.json", timeout=6000) as answer:
            pass
        answer.value.finished()
        page.wait_for_timeout(100)


class PageTest(InABrowser):
    @classmethod
    def setUpClass(cls):
        cls.begin("hold_out_rate: 0")
        cls.server.update(share=30)
        cls.server.ask(20)
        cls.server.force("open", task="qa")
        cls.server.ask(20)

    def test_says_what_metrics_and_report_say(self):
        self.wait_quiet()
        page = self.show()
        metrics = self.server.metrics()
        for source in ("computed", "cached", "carried"):
            [(_, value)] = samples(metrics, "carryover_prompt_tokens_total", source=source)
            text = page.locator(f"#prompt tr[data-key={source}] td:nth-child(3)").evaluate("e => e.firstChild.data")
            self.assertEqual(digits(text), value, source)
        self.assertGreater(samples(metrics, "carryover_prompt_tokens_total", source="carried")[0][1], 0)

        report = self.server.client.call("fidelity", "report")["cells"]
        self.assertGreaterEqual(len(report), 2)
        rows = page.locator("#gate tbody tr")
        self.assertEqual(rows.count(), len(report))
        for cell in report:
            task, bucket = cell["cell"]["task"], cell["cell"]["prefix_bucket"]
            row = rows.filter(has_text=f"{task}, {bucket}+ tokens").first
            self.assertIn(cell["state"].lower(), row.locator("td").nth(0).inner_text())
            self.assertEqual(digits(row.locator("td").nth(1).evaluate("e => e.firstChild.data")), int(cell["samples"]))
            measures = {measure["name"]: measure for measure in cell["measures"]}
            said = {m["name"]: m for g in self.server.status()["gate"]["rows"]
                    if (g["task"], g["prefix_bucket"]) == (task, bucket) for m in g["measures"]}
            for name in ("flip", "tv", "stop"):
                for side in ("mean", "lower", "upper", "limit"):
                    self.assertAlmostEqual(said[name][side], measures[name].get(side, 0), places=9, msg=f"{task} {name} {side}")
            self.assertEqual(row.locator("summary").count(), 1)

        for row in self.server.status()["fidelity"]["rows"]:
            where = {"task": row["task"], "prefix_bucket": str(row["prefix_bucket"]), "along": row["along"], "comparison": "carried"}
            self.assertEqual(sum(v for _, v in samples(metrics, "carryover_first_token_flips_total", **where)), row["carried"]["flips"])
            merged = buckets(metrics, "carryover_fidelity_kl_nats", **where)
            for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
                self.assertAlmostEqual(row["carried"]["kl"][name], quantile(merged, q), places=9)
        self.assertGreater(len(self.server.status()["fidelity"]["rows"]), 0)

        native = buckets(metrics, "carryover_time_to_first_token_seconds", plan="native")
        cells = page.locator("#latency tr[data-key=first_tokennative] td").all_inner_texts()
        self.assertAlmostEqual(shown_seconds(cells[4]) / quantile(native, 0.95), 1, delta=0.006)
        self.assertIn("loading blocks", page.locator("#latency tr[data-key=first_tokennative] th").inner_text())
        self.assertIn("30 %", page.locator("#versions tr", has_text=live_server.TARGET).inner_text())
        self.assertEqual(page.locator("#tile-violations b").inner_text(), "✓ 0")
        self.assertEqual(self.said, [])
        self.assertEqual(page.evaluate("broken"), [])

    def test_changes_live_and_keeps_its_place(self):
        page = self.show()
        page.evaluate("window.mark = 1")
        row = page.locator("#gate tbody tr", has_text="chat").first
        row.locator("summary").click()
        expect(row).to_contain_text("learning")
        self.server.force("closed", task="chat")
        try:
            expect(row).to_contain_text("closed", timeout=6000)
            expect(row).to_contain_text("set by an operator")
            expect(page.locator("#changes tbody tr").first).to_contain_text("learning → closed")
            self.assertTrue(page.locator("#gate tbody tr").first.inner_text().startswith("chat"), "the worst comes first")
            self.assertEqual(page.locator("#gate details[open]").count(), 1, "what was opened stays open")
        finally:
            self.server.force("evidence", task="chat")
        expect(row).to_contain_text("learning", timeout=6000)
        before = digits(page.locator("#ends tr[data-key=length] td:nth-child(3)").inner_text())
        self.server.ask(2)  # and two prefixes that were warmed: they end, too
        expect(page.locator("#ends tr[data-key=length] td:nth-child(2)")).to_have_text("4", timeout=6000)
        self.assertEqual(digits(page.locator("#ends tr[data-key=length] td:nth-child(3)").inner_text()), before + 4)
        self.assertEqual(page.evaluate("mark"), 1, "without being loaded again")
        self.assertEqual(self.said, [])

    def test_asks_nobody_else_and_shows_no_secret(self):
        page = self.show()
        page.wait_for_timeout(2500)
        self.assertGreaterEqual(sum(url.endswith("/status.json") for url in self.asked), 2)
        for url in self.asked:
            self.assertTrue(url.startswith(self.server.url + "/"), url)
        policy = page.request.get(self.server.url).headers["content-security-policy"]
        self.assertIn("default-src 'none'", policy)
        self.assertIn("script-src 'self'", policy)
        self.assertNotIn("unsafe", policy)
        self.assertEqual(page.evaluate("broken"), [])
        # That the policy holds: a script in the text of the page does not run.
        page.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); }")
        self.assertIsNone(page.evaluate("window.ran ?? null"))
        self.assertEqual(page.evaluate("broken.length"), 1)
        for text in (page.content(), json.dumps(self.server.status())):
            self.assertNotIn(live_server.SALT, text)

    def test_phone_scrolls_only_down(self):
        page = self.show(viewport=PHONE)
        page.locator("summary").first.click()
        self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), PHONE["width"])
        outside = page.evaluate("""() => [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() &&
            !e.parentElement.closest('.box, svg') && e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.outerHTML.slice(0, 80))""")
        self.assertEqual(outside, [])
        scrolled = page.evaluate("""() => { const box = document.querySelector('#gate').parentElement;
            box.scrollLeft = 1e6; return [box.scrollLeft, scrollX]; }""")
        self.assertGreater(scrolled[0], 0)
        self.assertEqual(scrolled[1], 0)

    def test_contrast_in_light_and_dark(self):
        backgrounds = set()
        for scheme in ("light", "dark"):
            page = self.show(color_scheme=scheme)
            data = self.server.status()
            data["provenance_violations"], data["draining"] = 2, True
            self.answer(page, data)
            expect(page.locator("#violations")).to_be_visible(timeout=6000)
            found = page.evaluate(CONTRASTS)
            self.assertGreater(len(found), 100)
            low = [text for text in found if text["ratio"] < (3 if text["large"] else 4.5)]
            self.assertEqual(low, [], scheme)
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(len(backgrounds), 2)

    def test_without_scripts(self):
        page = self.open(java_script_enabled=False)
        expect(page.locator("noscript table").first).to_be_visible()
        text = page.locator("body").inner_text()
        for words in (live_server.SOURCE, live_server.TARGET, "70 %", "30 %"):
            self.assertIn(words, text)
        expect(page.locator("#live")).to_be_hidden()
        self.assertEqual(self.said, [])

    def test_names_are_text_and_alarms_are_loud(self):
        page = self.show()
        data = self.server.status()
        evil = "<img src=x onerror='window.ran = 1'>"
        data["versions"]["rows"][0]["version"] = evil
        data["gate"]["rows"][0] |= {"task": evil, "explanation": evil}
        data["store"]["rows"][0]["provenance"] = evil
        data["provenance_violations"] = 3
        self.answer(page, data)
        alarm = page.locator("#violations")
        expect(alarm).to_contain_text("3 provenance violations", timeout=6000)
        expect(page.locator("#tile-violations")).to_contain_text("must be 0")
        for table in ("versions", "gate", "store"):
            expect(page.locator(f"#{table}")).to_contain_text(evil)
        self.assertEqual(page.locator("img").count(), 0)
        self.assertIsNone(page.evaluate("window.ran ?? null"))

    def test_a_thousand_cells_do_not_make_it_slow(self):
        page = self.show()
        data = self.server.status()
        row = data["gate"]["rows"][0]
        fidelity = data["fidelity"]["rows"][0]
        data["gate"]["rows"] = [row | {"task": f"task-{i}"} for i in range(100)]
        data["fidelity"]["rows"] = [fidelity | {"task": f"task-{i}"} for i in range(100)]
        data["gate"] |= {"cells": 1024, "left_out": 924}
        page.evaluate("""() => { window.long = []; new PerformanceObserver((list) =>
            long.push(...list.getEntries().map((e) => e.duration))).observe({ type: 'longtask' }); }""")
        self.answer(page, data)
        expect(page.locator("#gate-more")).to_contain_text("924 cells", timeout=6000)
        self.assertEqual(page.locator("#gate tbody tr").count(), 100)
        page.evaluate("window.long.length = 0")  # the rows are there; from here on only numbers change
        page.unroute("**/status.json")
        for i in range(100):
            data["gate"]["rows"][i] |= {"samples": i}
        self.answer(page, data)
        page.wait_for_timeout(5000)
        self.assertLess(max(page.evaluate("long"), default=0), 300, "milliseconds of one update")
        self.assertEqual(self.said, [])

    def test_tables_can_be_read_aloud(self):
        page = self.show(reduced_motion="reduce")
        self.assertEqual(page.evaluate("[...document.querySelectorAll('main table')].filter((t) => !t.caption?.textContent).length"), 0)
        self.assertEqual(page.evaluate("[...document.querySelectorAll('main th')].filter((t) => !t.scope).length"), 0)
        self.assertEqual(page.evaluate("[...document.querySelectorAll('svg[role=img]')].filter((s) => !s.getAttribute('aria-label')).length"), 0)
        page.locator("summary").first.click()
        self.assertEqual(page.evaluate("document.getAnimations().length"), 0)

    def test_zz_tells_when_the_server_goes_and_comes_back(self):
        page = self.show()
        # Someone's long answer holds the end off, so that draining can be seen.
        long_answer = self.server.begin_long_answer()
        self.addCleanup(long_answer.wait)
        self.addCleanup(long_answer.kill)
        expect(page.locator("#tile-running b")).to_have_text(re.compile("[1-9]"), timeout=6000)
        self.server.process.process.send_signal(signal.SIGTERM)
        expect(page.locator("#banner")).to_contain_text("draining", timeout=6000)
        self.server.process.process.kill()
        self.server.process.process.wait()
        expect(page.locator("#banner")).to_contain_text(re.compile(r"not answered for \d+ s"), timeout=15000)
        expect(page.locator("#state")).to_have_text("✕ no answer")
        self.assertIn("stale", page.locator("body").get_attribute("class"))
        first = page.locator("#banner").inner_text()
        expect(page.locator("#banner")).not_to_have_text(first, timeout=4000)  # the age grows
        expect(page.locator("#versions")).to_contain_text(live_server.TARGET)
        self.assertTrue(all("ERR_" in text or "Failed to load resource" in text for text in self.said), self.said)
        self.server.start()
        expect(page.locator("#state")).to_have_text("● serving", timeout=30000)
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#ends tr[data-key=length] td:nth-child(3)")).to_have_text("0")
        expect(page.locator("#versions")).to_contain_text("No version is loaded")


class TrialTest(InABrowser):
    @classmethod
    def setUpClass(cls):
        cls.begin("hold_out_rate: 0.5", "when_learning: CARRY")
        cls.server.update(share=100)

    def ask(self):
        """Until each arm got two more and they are not alike; adds them to what was asked."""
        before, arms = dict(self.asked_arms), self.asked_arms
        for _ in range(60):
            [answer] = self.server.ask(1, max_tokens=2)
            arms["carried" if answer["usage"].get("carried_tokens", 0) > 0 else "held_out"] += 1
            if min(arms[arm] - before[arm] for arm in arms) >= 2 and len(set(arms.values())) == 2:
                return
        self.fail(f"no such trial: {arms}")

    def check(self, page, before):
        """before: what /metrics said when the page was opened."""
        name = "carryover_trial_time_to_first_token_seconds"
        for arm, title in (("carried", "carried"), ("held_out", "held out (native)")):
            row = page.locator(f"#latency tr[data-key=trial{arm}]")
            expect(row.locator("td").nth(5)).to_have_text(str(self.asked_arms[arm]), timeout=6000)
            self.assertEqual(row.locator("th").inner_text(), f"Trial: first token, {title}")
            all_time = buckets(self.server.metrics(), name, arm=arm)
            old = dict(buckets(before, name, arm=arm))
            window = [(bound, upto - old.get(bound, 0)) for bound, upto in all_time]
            self.assertEqual(all_time[-1][1], self.asked_arms[arm])
            cells = row.locator("td").all_inner_texts()
            for begin, histogram in ((0, window), (3, all_time)):
                self.assertEqual(digits(cells[begin + 2]), histogram[-1][1], arm)
                for at, q in ((begin, 0.5), (begin + 1, 0.95)):
                    seconds = quantile(histogram, q)
                    # The page shows three digits, of less than a millisecond two.
                    self.assertAlmostEqual(shown_seconds(cells[at]) / seconds, 1, delta=0.006 if seconds >= 0.001 else 0.06,
                                           msg=f"{arm} {at}")

    def test_both_arms_of_the_trial(self):
        self.asked_arms = {"carried": 0, "held_out": 0}
        page = self.show()
        self.assertEqual(page.locator("#latency tr[data-key^=trial]").count(), 0, "no arm before there is a trial")
        before = self.server.metrics()
        self.ask()
        self.check(page, before)
        # One who comes later sees what came since then apart from all.
        page = self.show()
        before = self.server.metrics()
        for arm, asked in self.asked_arms.items():
            cells = page.locator(f"#latency tr[data-key=trial{arm}] td").all_inner_texts()
            self.assertEqual([*cells[:3], cells[5]], ["–", "–", "0", str(asked)])
        self.ask()
        self.check(page, before)
        self.assertEqual(self.said, [])


class UpdateTooFarTest(InABrowser):
    """Users get what is carried at once; of two updates one changes nothing and one too much."""

    SAME, FAR = "same-weights", "too-far"

    @classmethod
    def setUpClass(cls):
        cls.begin("hold_out_rate: 0.2", "when_learning: CARRY")
        cls.server.tasks, cls.server.lengths = ["qa"], [64]
        cls.server.load_source()
        carry = ("--carry-from", live_server.SOURCE)
        cls.server.load(cls.SAME, *carry, "--distinct", "again", path=live_server.ROOT / "models/demo" / live_server.SOURCE)
        far = live_server.perturbed(live_server.SOURCE, pathlib.Path(cls.folder) / "far", "model.layers.1.self_attn.", 1)
        cls.server.load(cls.FAR, *carry, path=far)

    def cell(self):
        """Of the update that is too far, as an operator's tool gets it."""
        [cell] = [c for c in self.server.client.call("fidelity", "report")["cells"] if c["cell"]["target"] == self.FAR]
        return cell

    def test_the_gate_closes_while_one_looks(self):
        page = self.show()
        page.evaluate("window.mark = 1")
        expect(page.locator("#gate")).to_contain_text("No request could carry yet")
        self.server.ask(2, version=self.SAME)
        gate, fidelity, changes = (page.locator(f"#{table} tbody tr") for table in ("gate", "fidelity", "changes"))
        same = fidelity.filter(has_text=self.SAME).first
        row = gate.filter(has_text=self.FAR)
        self.server.ask(2, version=self.FAR)
        expect(row.locator("td").first).to_have_text("◐ learning", timeout=6000)  # after so few
        expect(page.locator("#tile-gate small")).to_have_text("2 learning, 0 closed")
        expect(changes).to_have_text("No cell has changed yet.")
        for _ in range(30):
            self.server.ask(3, version=self.FAR)
            if self.cell()["state"] == "CLOSED":
                break
        self.let_it_ask(page)
        cell = self.cell()
        self.assertEqual(cell["state"], "CLOSED")
        self.assertEqual(row.locator("td").first.inner_text(), "■ closed")
        self.assertIn(self.FAR, gate.first.inner_text(), "the worst comes first")
        self.assertEqual(gate.filter(has_text=self.SAME).locator("td").first.inner_text(), "◐ learning")
        expect(page.locator("#tile-gate small")).to_have_text("1 learning, 1 closed")
        row.locator("summary").click()
        reasons = (cell["explanation"], row.locator("details span").inner_text())
        explanation, said = (re.sub(r"in \d+ s\.", "", text) for text in reasons)  # what is left of the cool-down
        self.assertEqual(said, explanation)
        self.assertRegex(explanation, "^Closed: .* went over a limit: (first-token flips|total variation|stop)")
        self.assertEqual(changes.count(), 1)
        self.assertIn(f"{live_server.SOURCE} → {self.FAR}", changes.locator("td").first.inner_text())
        self.assertEqual(changes.locator("td").all_inner_texts()[1:], ["learning → closed", "evidence"])
        self.assertEqual(page.locator("#transitions tbody td").all_inner_texts(), ["evidence", "1"])

        metrics = self.server.metrics()
        bound = {side: samples(metrics, "carryover_gate_bound", target=self.FAR, measure="tv", side=side)[0][1]
                 for side in ("mean", "floor", "limit")}
        mean, low, high, limit = (float(n) / 100 for n in re.findall(r"([\d.]+) %", row.locator("td").nth(3).inner_text())[:4])
        self.assertAlmostEqual(mean, bound["mean"], delta=0.006)
        self.assertAlmostEqual(limit, bound["limit"] + bound["floor"], delta=0.006)
        self.assertGreater(mean, limit)
        self.assertTrue(low <= mean <= high, (low, mean, high))

        # The worst first, in either table; what it shows is what /metrics has.
        self.assertIn(self.FAR, fidelity.first.inner_text())
        where = {"target": self.FAR, "comparison": "carried"}
        for far in fidelity.filter(has_text=self.FAR).all():
            along = "served" if "along carried text" in far.locator("th").inner_text() else "native"
            kl, tv = (float(far.locator("td").nth(i).evaluate("e => e.firstChild.data")) for i in (2, 5))
            total, positions = (sum(value for _, value in samples(metrics, f"carryover_fidelity_tv_{part}", along=along, **where))
                                for part in ("sum", "count"))
            self.assertAlmostEqual(tv / (total / positions), 1, delta=0.06)
            self.assertAlmostEqual(kl / quantile(buckets(metrics, "carryover_fidelity_kl_nats", along=along, **where), 0.5), 1, delta=0.06)
            self.assertGreater(tv, 10 * float(same.locator("td").nth(5).evaluate("e => e.firstChild.data")))

        # From here on nothing is carried, and that shows, too.
        carried, computed = (page.locator(f"#prompt tr[data-key={source}] td:nth-child(3)") for source in ("carried", "computed"))
        before = [digits(cell.evaluate("e => e.firstChild.data")) for cell in (carried, computed)]
        answers = self.server.ask(2, version=self.FAR)
        self.assertEqual([answer["cache"]["gate"] for answer in answers], ["closed"] * 2)
        prompt = 2 * (self.server.lengths[0] + live_server.SUFFIX_TOKENS)
        self.let_it_ask(page)
        after = [digits(cell.evaluate("e => e.firstChild.data")) for cell in (carried, computed)]
        self.assertEqual(after[0], before[0])
        self.assertGreaterEqual(after[1], before[1] + prompt)
        self.assertEqual(page.evaluate("mark"), 1, "without being loaded again")
        self.assertEqual(self.said, [])


if __name__ == "__main__":
    PROGRAMS = sys.argv.pop(1)
    unittest.main(verbosity=2)
