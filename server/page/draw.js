// Tables whose rows stay where their key stays, and small pictures in SVG. Text only ever gets in
// as text; what a picture says is also said in words, beside it or in its label.

const SVG = 'http://www.w3.org/2000/svg';

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function picture(className, width, height, label) {
  const svg = shape('svg', { class: className, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none' });
  if (label) {
    svg.setAttribute('role', 'img');
    svg.setAttribute('aria-label', label);
  } else {
    svg.setAttribute('aria-hidden', 'true');
  }
  return svg;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// What a cell showed last, so that the page touches only what has changed.
const shown = new WeakMap();

// cell: text, or {text, small, className, chip, title, key, make}: make() builds a node and is called when key changes.
function setCell(node, cell) {
  const content = typeof cell === 'object' ? cell : { text: cell };
  const key = JSON.stringify([content.text, content.small, content.className, content.chip, content.title, content.key]);
  if (shown.get(node) === key) return;
  shown.set(node, key);
  node.className = content.className ?? '';
  node.title = content.title ?? '';
  const open = node.querySelector('details')?.open;
  node.replaceChildren();
  if (content.make) node.append(content.make());
  if (content.chip) node.append(element('span', content.text, `chip ${content.chip}`));
  else if (content.text !== undefined) node.append(document.createTextNode(content.text));
  if (content.small) node.append(element('small', content.small));
  if (open) node.querySelector('details')?.setAttribute('open', '');
}

// rows: [{key, cells}]. The first cell of a row is its header.
export function fillTable(id, rows, nothing = 'Nothing yet.') {
  const body = document.getElementById(id).tBodies[0];
  const old = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  if (rows.length === 0) {
    if (!old.has('')) {
      const row = element('tr');
      row.dataset.key = '';
      const cell = element('td', nothing, 'empty');
      cell.colSpan = 20;
      row.append(cell);
      body.replaceChildren(row);
    }
    return;
  }
  rows.forEach(({ key, cells }, index) => {
    let row = old.get(key);
    old.delete(key);
    if (!row) {
      row = element('tr');
      row.dataset.key = key;
      cells.forEach((_, i) => {
        const cell = element(i === 0 ? 'th' : 'td');
        if (i === 0) cell.scope = 'row';
        row.append(cell);
      });
    }
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    cells.forEach((cell, i) => setCell(row.cells[i], cell));
  });
  for (const row of old.values()) row.remove();
}

// A share of 1 as a bar.
export function meter(value, className, label) {
  const svg = picture('meter', 100, 10, label);
  svg.append(shape('rect', { class: 'track', width: 100, height: 10, rx: 2 }));
  const width = Math.max(0, Math.min(1, value || 0)) * 100;
  svg.append(shape('rect', { class: `fill ${className}`, width, height: 10, rx: 2 }));
  return svg;
}

// A measure of the gate: where its mean can be, against the limit above the floor.
export function gateBar({ mean, lower, upper, limit, floor }, label) {
  const wall = limit + floor;
  const right = Math.max(wall * 2.5, mean * 1.2);
  const x = (value) => Math.max(0, Math.min(1, value / right)) * 164 + 2;
  const svg = picture('gatebar', 168, 26, label);
  svg.removeAttribute('preserveAspectRatio');
  if (mean > wall) svg.classList.add('over');
  // The lower bound looks at late samples and may be over the upper one after a turn.
  const [from, to] = [Math.min(lower, upper), Math.max(lower, upper)];
  svg.append(shape('rect', { class: 'track', x: 2, y: 12, width: 164, height: 2 }));
  svg.append(shape('rect', { class: 'band', x: x(from), y: 8, width: Math.max(2, x(to) - x(from)), height: 10, rx: 2 }));
  svg.append(shape('line', { class: 'floor', x1: x(floor), x2: x(floor), y1: 3, y2: 23 }));
  svg.append(shape('line', { class: 'limit', x1: x(wall), x2: x(wall), y1: 2, y2: 24 }));
  svg.append(shape('circle', { class: 'mean', cx: x(mean), cy: 13, r: 4 }));
  return svg;
}

// lines: [{className, values}] over one scale from 0; NaN breaks a line.
export function spark(tile, lines) {
  const all = lines.flatMap(({ values }) => values).filter(Number.isFinite);
  const top = Math.max(...all, 1e-9);
  let svg = tile.querySelector('svg');
  if (!svg) tile.append((svg = picture('spark', 100, 30)));
  svg.replaceChildren(...lines.map(({ className, values }) => {
    const step = 100 / Math.max(1, values.length - 1);
    let path = '';
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      const next = path === '' || !Number.isFinite(values[i - 1]) ? 'M' : 'L';
      path += `${next}${(i * step).toFixed(1)} ${(28 - (value / top) * 26).toFixed(1)}`;
    });
    return shape('path', { class: className, d: path });
  }));
}
