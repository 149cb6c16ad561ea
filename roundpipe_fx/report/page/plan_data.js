// A plan as its JSON has it, with columns as rows and what the views look up again and again.

const FATES = {
  saved: "saved from forward to backward",
  hoisted: "saved, and never recomputed",
  recomputed: "recomputed in the backward",
  replayed: "recomputed from its saved generator state",
  offloaded: "leaves the device for the host, and comes back for the backward",
  tiled: "computed in tiles, never there as a whole",
  passing: "needed only by the forward",
  backward: "of the backward, freed before it ends",
  gradient: "gradient that the backward returns",
  incoming: "incoming gradient, held by the caller",
};

/** What a fate is called; the plan's word for values that the backward does not need is `passing`. */
function fateText(fate) {
  return fate === "passing" ? "forward only" : fate;
}

function rowsOf(columns, strings) {
  const names = Object.keys(columns).filter(name => name !== "texts");
  const texts = new Set(columns.texts);
  const count = names.length ? columns[names[0]].length : 0;
  const rows = new Array(count);
  for (let at = 0; at < count; at += 1) {
    const row = {};
    for (const name of names) row[name] = texts.has(name) ? strings[columns[name][at]] : columns[name][at];
    rows[at] = row;
  }
  return rows;
}

function readPlan({ name, plan }) {
  const memory = plan.memory;
  const moments = memory ? rowsOf(memory.moments, plan.strings) : [];
  const lifetimes = memory ? rowsOf(memory.values, plan.strings) : [];
  const source = memory ? memory.source : {};
  const emitted = new Map();
  for (const line of plan.lines ? rowsOf(plan.lines, plan.strings) : []) {
    if (!emitted.has(line.name)) emitted.set(line.name, []);
    emitted.get(line.name).push(line);
  }
  const peaks = plan.pipeline ? plan.pipeline.peak_bytes : [plan.peak.bytes];
  const sum = key => plan.stages.reduce((total, stage) => total + stage[key], 0);
  const values = valuesOf(plan, lifetimes, emitted);
  const byName = new Map(values.map(value => [value.name, value]));
  for (const lifetime of lifetimes) lifetime.value = byName.get(lifetime.origin);
  return {
    name, plan, moments, lifetimes, source, emitted, values, byName,
    forwardMoments: memory ? memory.forward : 0,
    alternatives: { ...plan.alternatives, values: rowsOf(plan.alternatives.values, plan.strings) },
    peak: Math.max(...peaks),
    forwardSeconds: sum("forward_seconds"),
    recomputeSeconds: sum("recompute_seconds"),
    backwardSeconds: sum("backward_seconds"),
    savedBytes: plan.stages.flatMap(stage => [...stage.saved, ...stage.hoisted])
      .reduce((total, { bytes }) => total + bytes, 0),
  };
}

function emittedText(lines) {
  return lines.map(({ file, line }) => `${file}:${line}`).join(", ");
}

/** Every value once: those that the plan lists, and the others that are alive at some moment of the step. */
function valuesOf(plan, lifetimes, emitted) {
  const values = new Map();
  const add = value => values.set(value.name, {
    reason: "", times: 0, seconds: 0, price: null, type: "", lifetimes: [], emitted: emitted.get(value.name) || [],
    emittedText: emittedText(emitted.get(value.name) || []), ...value,
  });
  for (const stage of plan.stages) {
    for (const fate of ["passing", "saved", "hoisted", "recomputed", "replayed"]) {
      for (const value of stage[fate]) {
        add({ ...value, fate, stage: stage.index, price: fate === "passing" ? null : value.recompute_seconds });
      }
    }
  }
  for (const tiles of plan.tiles) {
    if (values.has(tiles.name) && values.get(tiles.name).fate === "tiled") continue; // a loop that is run again
    const lines = emitted.get(tiles.loop) || [];
    add({ ...tiles, fate: "tiled", stage: null, price: null, emitted: lines, emittedText: emittedText(lines),
      reason: `${tiles.tiles} tiles of its ${tiles.rows} rows, one after another` });
  }
  const copies = new Set(lifetimes.filter(({ name, origin }) => name !== origin).map(({ origin }) => origin));
  const forward = plan.memory ? plan.memory.forward : 0;
  for (const lifetime of lifetimes) {
    const { origin, first } = lifetime;
    if (!values.has(origin)) {
      let fate = first > forward ? "backward" : "passing";
      if (lifetime.gradient) fate = "gradient";
      else if (copies.has(origin)) fate = "recomputed";
      else if (origin === "incoming gradient") fate = "incoming";
      else if (first <= forward && lifetime.last > forward) fate = "saved";
      const line = emitted.get(origin);
      const type = line ? (/: "([^"]*)"/.exec(line[0].text) || ["", ""])[1] : "";
      add({ name: origin, fate, stage: stageOf(plan, first), module: lifetime.module, line: lifetime.line,
        bytes: lifetime.bytes, type, times: fate === "recomputed" ? 1 : 0 });
    }
    const value = values.get(origin);
    value.lifetimes.push(lifetime);
    if (value.fate === "passing" && plan.training && first <= forward && lifetime.last > forward) {
      value.fate = "saved";
      value.reason = "through a view of it, or as an output that the caller holds";
    }
  }
  for (const name of plan.on_host || []) {
    const value = values.get(name);
    if (value) Object.assign(value, { fate: "offloaded", reason: value.reason || "as the model asks" });
  }
  for (const away of plan.pipeline ? plan.pipeline.offloaded : []) {
    if (!values.has(away.name)) add({ name: away.name, stage: null, module: "", line: "", bytes: away.bytes });
    const value = values.get(away.name);
    value.fate = "offloaded";
    value.reason = `to make room, in ${away.microbatches} of ${plan.pipeline.microbatches} microbatches`;
  }
  return [...values.values()];
}

function stageOf(plan, moment) {
  const columns = plan.memory.moments;
  const found = /^stage_(\d+)_/.exec(plan.strings[columns.call[moment]] || "");
  return found ? Number(found[1]) : null;
}

/** Device, action and time of each bar, of what a pipeline was predicted or measured to do. */
function barsOf(rows) {
  return rows.map(([device, action, start, end, bytes]) =>
    ({ device, action, kind: action[0], start, end, bytes }));
}

/** Copies between the devices and the host, of an offloaded model. */
function copiesOf(timeline, strings) {
  return timeline.copies.map(([device, action, what, toHost, start, end, bytes, values]) =>
    ({ device, action, what, toHost, start, end, bytes, values: values.map(number => strings[number]) }));
}

/** Transfers of a pipeline: from which bar's end on, to which bar's start. */
function transfersOf(order, bars) {
  const at = new Map(bars.map(bar => [`${bar.device} ${bar.action}`, bar]));
  const found = [];
  for (const line of order.split("\n")) {
    const separator = line.indexOf(":");
    const device = Number(line.slice(0, separator));
    let waiting = [];
    for (const action of line.slice(separator + 1).trim().split(" ")) {
      if (action.startsWith("V:")) {
        const [of, peer] = action.slice(2).split("<");
        waiting.push(`${peer} ${of}`);
      } else if (!action.startsWith("S:")) {
        for (const key of waiting) {
          if (at.has(key) && at.has(`${device} ${action}`)) found.push([at.get(key), at.get(`${device} ${action}`)]);
        }
        waiting = [];
      }
    }
  }
  return found;
}
