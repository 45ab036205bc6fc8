// Asks the server for its numbers every two seconds and shows them. When it does not answer, what is
// shown stays, marked with its age.

import { bytes, clock, count, part, seconds, share, trim } from './format.js';
import { element, fillTable, gateBar, meter, setText, spark } from './draw.js';
import { History, RATE_SECONDS, WINDOW_SECONDS, grown, grownHistogram, quantile, reusedShare, sum } from './history.js';

const INTERVAL_MS = 2000;
const HIDDEN_INTERVAL_MS = 10000; // nobody looks
const PATIENCE_MS = 5000;
const STALE_SECONDS = 6;
const POINTS = WINDOW_SECONDS / 2;

const STATES = { open: ['● open', 'good'], repaired: ['◆ repaired', 'good'], learning: ['◐ learning', ''], closed: ['■ closed', 'bad'] };
const MEASURES = ['flip', 'tv', 'stop'];
const PLANS = { native: 'First token, native', direct: 'First token, carried' };
const ARMS = { carried: 'Trial: first token, carried', held_out: 'Trial: first token, held out (native)' };
const SOURCES = { computed: 'Computed', cached: 'Own cache', carried: 'Carried from another version', repaired: 'Carried and repaired' };

const history = new History();
const lines = {}; // of the tiles: name → numbers, the oldest first
let answered = 0; // when the last answer came, by this browser's clock
let latest = null;

const $ = (id) => document.getElementById(id);
const number = (text, more) => ({ text, className: 'n', ...more });

function showNote(id, text) {
  $(id).hidden = !text;
  setText($(id), text ?? '');
}

const leftOut = (rows) => (rows > 0 ? `${count(rows)} more rows are not shown.` : '');

function remember(name, value) {
  const values = (lines[name] ??= []);
  values.push(value);
  if (values.length > POINTS) values.shift();
  return values;
}

function tile(id, value, small, bad = false) {
  const item = $(id);
  setText(item.querySelector('b'), value);
  setText(item.querySelector('small'), small);
  item.classList.toggle('bad', bad);
}

function windowName() {
  const covered = history.covered;
  if (covered < 1) return 'Since this page opened';
  if (covered >= WINDOW_SECONDS - 5) return `Last ${WINDOW_SECONDS / 60} min`;
  return covered < 90 ? `Last ${Math.round(covered)} s` : `Last ${(covered / 60).toFixed(1)} min`;
}

function showHead(data) {
  setText($('about'), `version ${data.build}, up ${seconds(data.now - data.started)}`);
  const [text, kind] = data.draining ? ['◌ draining', 'warn'] : data.serving ? ['● serving', 'good'] : ['○ not serving', 'warn'];
  $('state').hidden = false;
  setText($('state'), text);
  $('state').className = `chip ${kind}`;
  const broken = data.provenance_violations;
  $('violations').hidden = broken === 0;
  setText($('violations'), `${count(broken)} provenance violation${broken === 1 ? '' : 's'}: carried state was taken for native. ` +
    'What this server calls native can no longer be trusted. Take it out of service, and report it.');
}

function showTiles(data) {
  const now = history.last;
  const recent = history.before(RATE_SECONDS);
  const span = now.now - recent.now;
  const first = history.windowStart;
  const reusedTotal = grown(first.prompt, now.prompt);
  const window = windowName().toLowerCase();

  tile('tile-running', count(data.requests.running), `${count(data.requests.waiting)} waiting (${count(data.requests.waiting_tokens)} tokens), ` +
    `${share(part(data.blocks.active, data.blocks.total))} of KV blocks`);
  spark($('tile-running'), [{ className: '', values: remember('running', data.requests.running + data.requests.waiting) }]);

  const speed = span > 0 ? (now.generated - recent.generated) / span : NaN;
  tile('tile-speed', span > 0 ? `${trim(speed)} /s` : '–', `${count(data.tokens.generated)} since the start`);
  spark($('tile-speed'), [{ className: '', values: remember('speed', speed) }]);

  const carried = part((reusedTotal.carried ?? 0) + (reusedTotal.repaired ?? 0), sum(reusedTotal));
  tile('tile-reused', share(reusedShare(reusedTotal)), sum(reusedTotal) > 0 ? `${window}; ${share(carried)} carried` : `no prompt ${window}`);
  spark($('tile-reused'), [{ className: '', values: remember('reused', reusedShare(grown(recent.prompt, now.prompt))) }]);

  const p50 = (plan, from) => quantile(grownHistogram(from.latency.first_token[plan], now.latency.first_token[plan]), 0.5);
  tile('tile-first', `${seconds(p50('native', first))} | ${seconds(p50('direct', first))}`, `native | carried, ${window}`);
  spark($('tile-first'), [
    { className: 'native', values: remember('native', p50('native', recent)) },
    { className: 'carried', values: remember('direct', p50('direct', recent)) },
  ]);

  const { states, cells } = data.gate;
  tile('tile-gate', `${count(states.open + states.repaired)} of ${count(cells)}`,
    `${count(states.learning)} learning, ${count(states.closed)} closed`);

  const refused = sum(grown(first.rejected, now.rejected));
  const failed = sum(grown(first.failed, now.failed));
  tile('tile-refused', count(Math.max(refused, failed)), `${window}; refused ${count(refused)}`);
  spark($('tile-refused'), [{ className: '', values: remember('refused', sum(grown(recent.failed, now.failed))) }]);

  const broken = data.provenance_violations;
  tile('tile-violations', broken === 0 ? '✓ 0' : `⚠ ${count(broken)}`, broken === 0 ? 'carried was never called native' : 'must be 0', broken !== 0);
}

function showVersions(data) {
  fillTable('versions', data.versions.rows.map((row) => ({
    key: `${row.model}\n${row.version}`,
    cells: [
      { text: row.version, small: row.model },
      { text: row.share > 0 ? `${row.state}, serving` : row.state, chip: row.share > 0 ? 'good' : row.state === 'loading' ? 'warn' : ' ' },
      { text: `${trim(row.share)} %`, key: row.share, make: () => meter(row.share / 100, 'cached') },
      row.carry_from.join(', ') || 'nobody',
      number(count(row.running)), number(count(row.cached_tokens)), number(bytes(row.weight_bytes)),
      { text: `${row.weights_dtype} / ${row.kv_dtype}`, className: 'w' },
      { key: row.fingerprint, make: () => element('code', row.fingerprint) },
    ],
  })), 'No version is loaded.');
  showNote('versions-more', leftOut(data.versions.left_out));
}

const cellName = (row) => ({
  text: `${row.task}, ${count(row.prefix_bucket)}+ tokens`,
  small: [`${row.model}: ${row.source} → ${row.target}`, row.plan, row.answer && `${row.answer} answers`,
    row.along === 'served' && 'along carried text'].filter(Boolean).join(', '),
});
const cellKey = (row) => [row.model, row.source, row.target, row.plan, row.task, row.prefix_bucket, row.answer ?? row.along].join('\n');

function gateMeasure(row, measure) {
  if (row.samples === 0 || !measure) return { text: 'no samples', className: 'empty' };
  const { mean, lower, upper, limit, floor } = measure;
  const [low, high] = [Math.min(lower, upper), Math.max(lower, upper)];
  const text = `${share(mean)} (${share(low)} to ${share(high)})`;
  const against = `limit ${share(limit + floor)}` + (floor > 0 ? `, of it floor ${share(floor)}` : '');
  return { small: `${text}; ${against}`, key: [mean, lower, upper, limit, floor], make: () => gateBar(measure, `${text}, ${against}`) };
}

function gateState(row) {
  const [text, chip] = STATES[row.state] ?? [row.state, ''];
  const notes = [row.forced && `set by an operator; evidence says ${row.evidence_state}`,
    row.borrowed && 'with evidence of cells like it', row.starved && 'starved: too few shadows complete'].filter(Boolean);
  return { text, chip: chip || ' ', small: notes.join('; ') };
}

function why(text) {
  const details = element('details');
  details.append(element('summary', 'why'), element('span', text));
  return details;
}

function showGate(data) {
  fillTable('gate', data.gate.rows.map((row) => ({
    key: cellKey(row),
    cells: [
      cellName(row), gateState(row),
      number(count(row.samples), { small: `${count(row.dropped)} dropped, ${count(row.prefixes)} prefixes, ${count(row.controls)} controls` }),
      ...MEASURES.map((name) => gateMeasure(row, row.measures.find((measure) => measure.name === name))),
      { key: row.explanation, make: () => why(row.explanation) },
    ],
  })), 'No request could carry yet.');
  const more = [data.gate.left_out > 0 && `${count(data.gate.left_out)} cells that look better are not shown.`,
    data.gate.refused > 0 && `${count(data.gate.refused)} decisions and samples found no room for a cell and were served natively.`];
  showNote('gate-more', more.filter(Boolean).join(' '));
  fillTable('changes', data.gate.recent.map((row, i) => ({
    key: `${row.time} ${i} ${cellKey(row)}`,
    cells: [{ text: clock(row.time), className: 'w' }, cellName(row), { text: `${row.from} → ${row.to}`, className: 'w' },
      { text: row.reason, small: row.hidden ? 'below an operator\'s state' : undefined }],
  })), 'No cell has changed yet.');
  fillTable('transitions', data.gate.transitions.map((row) => ({
    key: `${row.from} ${row.to} ${row.reason}`,
    cells: [{ text: `${row.from} → ${row.to}`, className: 'w' }, row.reason, number(count(row.count))],
  })), 'None.');
}

const rate = (some, all) => number(share(part(some, all)), { small: all > 0 ? `${count(some)} of ${count(all)}` : undefined });

function flips(numbers, className) {
  if (numbers.samples === 0) return { text: 'not measured', className: 'empty' };
  const value = numbers.flips / numbers.samples;
  return {
    text: share(value), small: `${count(numbers.flips)} of ${count(numbers.samples)}` + (numbers.invalid > 0 ? `; ${count(numbers.invalid)} invalid` : ''),
    key: value, make: () => meter(value, className),
  };
}

function showFidelity(data) {
  const { rows } = data.fidelity;
  fillTable('fidelity', rows.map((row) => {
    const { carried, control, old } = row;
    const kl = (p) => number(trim(carried.kl[p]), { small: trim(control.kl[p]) });
    const recovered = carried.kl_mean !== null && old.kl_mean > 0 ? 1 - carried.kl_mean / old.kl_mean : NaN;
    return {
      key: cellKey(row),
      cells: [
        cellName(row), flips(carried, 'carried'), flips(control, 'computed'), kl('p50'), kl('p95'), kl('p99'),
        number(trim(carried.tv), { small: trim(control.tv) }),
        rate(carried.fragile, carried.positions), rate(carried.stop_disagreements, carried.stops_compared),
        number(`${trim(carried.margin_native)} → ${trim(carried.margin_carried)}`, { small: `shift ${trim(carried.margin_shift)}` }),
        number(share(recovered), { small: old.samples > 0 ? `${count(old.samples)} samples` : undefined }),
      ],
    };
  }), 'No request was compared yet.');
  const more = [data.fidelity.left_out > 0 && `${count(data.fidelity.left_out)} cells with fewer flips are not shown.`,
    data.fidelity.without_samples > 0 && `${count(data.fidelity.without_samples)} cells have no sample yet.`,
    data.fidelity.without_cell > 0 && `${count(data.fidelity.without_cell)} samples found no room for a cell.`];
  showNote('fidelity-more', more.filter(Boolean).join(' '));
  showMargins(data.fidelity.margins);
}

function showMargins({ native, carried }) {
  const inside = (histogram, i) => part((i < histogram.bounds.length ? histogram.cumulative[i] : histogram.count) -
    (i > 0 ? histogram.cumulative[i - 1] : 0), histogram.count);
  const { bounds } = native;
  const names = [...bounds, Infinity].map((bound, i) =>
    i === 0 ? `${trim(bound)} or less` : i === bounds.length ? `over ${trim(bounds[i - 1])}` : `${trim(bounds[i - 1])} to ${trim(bound)}`);
  const bar = (histogram, i, className) => {
    const value = inside(histogram, i);
    return { text: share(value), key: value, make: () => meter(value, className) };
  };
  fillTable('margins', native.count === 0 ? [] : names.map((name, i) => ({
    key: name, cells: [{ text: name, className: 'w' }, bar(native, i, 'native'), bar(carried, i, 'carried')],
  })));
}

function showTraffic(data) {
  const first = history.windowStart;
  const now = history.last;
  for (const header of document.querySelectorAll('th.window')) setText(header, windowName());
  const prompt = grown(first.prompt, now.prompt);
  fillTable('prompt', Object.keys(SOURCES).map((source) => {
    const value = part(prompt[source] ?? 0, sum(prompt));
    const text = `${share(value)} (${count(prompt[source] ?? 0)})`;
    return {
      key: source,
      cells: [SOURCES[source], { text, key: value, make: () => meter(value, source) },
        number(count(data.tokens.prompt[source] ?? 0), { small: share(part(data.tokens.prompt[source] ?? 0, sum(data.tokens.prompt))) })],
    };
  }));
  const ends = (name, from, to) => Object.keys(to).map((key) => ({
    key: name + key, cells: [`${name}${key.replaceAll('_', ' ')}`, number(count(to[key] - (from[key] ?? 0))), number(count(to[key]))],
  }));
  fillTable('ends', [...ends('', first.finished, now.finished), ...ends('refused: ', first.rejected, now.rejected),
    ...ends('failed: ', first.failed, now.failed)]);

  const latency = [];
  const add = (key, name, from, to) => {
    const recent = grownHistogram(from, to);
    latency.push({
      key, cells: [name, ...[recent, to].flatMap((of) => [number(seconds(quantile(of, 0.5))), number(seconds(quantile(of, 0.95))),
        number(count(of.count))])],
    });
  };
  const addAll = (name, names) => {
    for (const [key, to] of Object.entries(now.latency[name])) add(name + key, names(key), first.latency[name][key], to);
  };
  const means = (plan) => {
    const { queue, load, compute } = data.latency.first_token_part_means[plan] ?? {};
    return queue > 0 ? `on average ${seconds(queue)} in the queue, ${seconds(load)} loading blocks, ${seconds(compute)} computing` : undefined;
  };
  addAll('first_token', (plan) => ({ text: PLANS[plan] ?? `First token, ${plan}`, small: means(plan) }));
  addAll('trial', (arm) => ARMS[arm] ?? arm);
  add('inter_token', 'Between two tokens', first.latency.inter_token, now.latency.inter_token);
  add('queue', 'In the queue', first.latency.queue, now.latency.queue);
  addAll('block_load', (tier) => `Loading blocks from ${tier}`);
  fillTable('latency', latency);
}

function showShadows(data) {
  const { shadows } = data;
  setText($('shadows-note'), `${count(shadows.waiting)} wait or run now. They began ${seconds(quantile(shadows.lag, 0.5))} after their request ` +
    `(p50; p95 ${seconds(quantile(shadows.lag, 0.95))}), computed ${count(shadows.tokens)} tokens and left ${count(shadows.refreshed_blocks)} native blocks.`);
  fillTable('shadows', Object.entries(shadows.arms).map(([arm, outcomes]) => {
    const { completed = 0, ...dropped } = outcomes;
    const lost = sum(dropped);
    const reasons = Object.entries(dropped).filter(([, n]) => n > 0).map(([reason, n]) => `${reason.replaceAll('_', ' ')} ${count(n)}`);
    return { key: arm, cells: [arm, number(count(completed)), number(count(lost)), number(share(part(completed, completed + lost))), reasons.join(', ')] };
  }));
}

function showStore(data) {
  const { store } = data;
  const counts = (rows) => rows.map((row) => `${count(row.count)} ${row.tier ? `${row.tier} ` : ''}${row.reason.replaceAll('_', ' ')}`).join(', ');
  setText($('store-note'), `${count(data.blocks.used)} of ${count(data.blocks.total)} blocks in use. ` +
    `${share(part(store.hit_tokens, store.lookup_tokens))} of prompt tokens looked up were found.` +
    (store.evictions.length ? ` Left: ${counts(store.evictions)}.` : '') + (store.rejects.length ? ` Rejected: ${counts(store.rejects)}.` : ''));
  fillTable('store', store.rows.map((row) => ({
    key: `${row.model}\n${row.provenance}\n${row.tier}`,
    cells: [{ text: row.provenance, small: row.model }, row.tier, number(count(row.blocks)), number(bytes(row.bytes)), number(count(row.hit_tokens))],
  })), 'Empty.');
  showNote('store-more', leftOut(store.left_out));
}

function show(data) {
  history.add(data);
  showHead(data);
  showTiles(data);
  showVersions(data);
  showGate(data);
  showFidelity(data);
  showTraffic(data);
  showShadows(data);
  showStore(data);
  $('live').hidden = false;
}

// Says when what is shown is old, or the server is about to go.
function showAge() {
  const age = (Date.now() - answered) / 1000;
  const stale = answered === 0 ? false : age > STALE_SECONDS;
  document.body.classList.toggle('stale', stale);
  let text = '';
  if (stale) text = `The server has not answered for ${seconds(Math.round(age))}. What is shown is as of ${clock(answered / 1000)}.`;
  else if (latest?.draining) text = 'The server is draining: it finishes what runs, refuses new requests and then ends.';
  $('banner').hidden = text === '';
  setText($('banner'), text);
  if (stale) {
    setText($('state'), '✕ no answer');
    $('state').className = 'chip bad';
  }
}

async function poll() {
  try {
    const answer = await fetch('status.json', { cache: 'no-store', signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.ok) {
      latest = await answer.json();
      answered = Date.now();
      show(latest);
    }
  } catch (error) {
    // A server that is gone is no news for the console; a fault of this page is.
    if (!(error instanceof TypeError && /fetch/i.test(error.message)) && error.name !== 'TimeoutError' && error.name !== 'AbortError') console.error(error);
  }
  showAge();
  setTimeout(poll, document.hidden ? HIDDEN_INTERVAL_MS : INTERVAL_MS);
}

setInterval(showAge, 1000);
poll();
