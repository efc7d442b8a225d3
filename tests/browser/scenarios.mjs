// What the tests do in the page. Run by test_page.py as
//
//     node scenarios.mjs '{"scenario": "search", "url": ..., "chromium": ..., "playwright": ..., ...}'
//
// The last line of stdout is JSON: what the scenario found, and what the page complained of that is this pack's.

import { Session } from "./page.mjs";

const EMPTY = { nodes: [], links: [], groups: [], version: 0.4, last_node_id: 0, last_link_id: 0 };
const EMPTY_SPOT = [1150, 760]; // of the canvas, in pixels
const HOSTILE = '<img src=x onerror="window.h3bwPwned=1"><b>bold</b>';

/** A double click on the empty canvas opens the search box. A busy page can miss one: it is tried again. */
async function openSearch(page) {
  const box = page.locator("input[role=combobox]");
  for (let left = 3; left > 0 && !(await box.isVisible()); left -= 1) {
    await page.mouse.move(...EMPTY_SPOT);
    await page.mouse.dblclick(EMPTY_SPOT[0], EMPTY_SPOT[1] + 10 * left); // not where the last one was
    await box.waitFor({ timeout: 20_000 }).catch(() => {});
  }
  await box.waitFor({ timeout: 1000 });
}

async function search(session) {
  const { page, options } = session;
  await session.load(EMPTY);
  const found = {};
  for (const word of options.words) {
    await openSearch(page);
    const before = await page.locator("[role=option]").allInnerTexts();
    await page.locator("input[role=combobox]").fill(word);
    await page.waitForFunction(
      (old) => [...document.querySelectorAll("[role=option]")].map((option) => option.innerText).join() !== old,
      before.join(),
    );
    // The list grows while it is scrolled to; what a person sees without scrolling is what counts.
    found[word] = (await page.locator("[role=option]").allInnerTexts()).map((item) => item.split("\n")[0]);
    await session.photograph(`search-${word}`);
    await page.keyboard.press("Escape");
    await page.locator("input[role=combobox]").waitFor({ state: "detached" });
  }
  return { found };
}

/** Adds a node as a person does: search, Enter, a click where it is to lie. Returns its id. */
async function addBySearch(session, word, title) {
  const { page } = session;
  const before = await page.evaluate(() => window.app.graph.nodes.map((node) => node.id));
  await openSearch(page);
  await page.locator("input[role=combobox]").fill(word);
  await page.locator("[role=option]", { hasText: title }).first().click();
  await page.waitForFunction((known) => window.app.graph.nodes.length > known, before.length);
  // The new node hangs on the mouse until it is put down.
  await page.mouse.move(EMPTY_SPOT[0] - 300, EMPTY_SPOT[1] - 200);
  await session.frames();
  await page.mouse.click(EMPTY_SPOT[0] - 300, EMPTY_SPOT[1] - 200);
  await session.frames();
  return await page.evaluate((known) => {
    const { graph, canvas } = window.app;
    const node = graph.nodes.find((found) => !known.includes(found.id));
    node.pos = [480 * known.length, -600]; // out of the way of the next double click
    canvas.setDirty(true, true);
    return node.id;
  }, before);
}

/** Where a slot of a node is on the screen. */
async function slotAt(session, id, kind, name) {
  return await session.page.evaluate(
    ({ id, kind, name }) => {
      const { graph, canvas } = window.app;
      const node = graph.getNodeById(id);
      const slots = kind === "input" ? node.inputs : node.outputs;
      const slot = slots.findIndex((found) => found.name === name);
      const dot = document.querySelector(`[data-slot-key="${id}-${kind === "input" ? "in" : "out"}-${slot}"]`);
      if (dot) {
        const box = dot.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
      }
      const [x, y] = kind === "input" ? node.getInputPos(slot) : node.getOutputPos(slot);
      const box = canvas.canvas.getBoundingClientRect();
      const [left, top] = canvas.ds.convertOffsetToCanvas([x, y]);
      return [box.left + left, box.top + top];
    },
    { id, kind, name },
  );
}

/** Draws a link with the mouse. */
async function connect(session, from, output, to, input) {
  const { mouse } = session.page;
  const [start, end] = [await slotAt(session, from, "output", output), await slotAt(session, to, "input", input)];
  await mouse.move(...start);
  await session.frames();
  await mouse.down();
  await session.frames();
  await mouse.move((start[0] + end[0]) / 2, (start[1] + end[1]) / 2, { steps: 5 });
  await mouse.move(...end, { steps: 5 });
  await session.frames();
  await mouse.up();
  await session.frames();
}

/** Two nodes found, placed, connected with the mouse, and queued. */
async function build(session) {
  const { page } = session;
  await session.load(EMPTY);
  const model = await addBySearch(session, "self-test model", "H3 Self-Test Model");
  const blocks = await addBySearch(session, "fuse h3", "Fuse H3 Blocks");
  const report = await addBySearch(session, "runtime report", "H3 Runtime Report");
  await session.fit();
  await connect(session, model, "MODEL", blocks, "model");
  await connect(session, blocks, "MODEL", report, "model");
  const run = await session.queue();
  await session.frames(10);
  await session.photograph("built");
  return {
    ended: run.ended,
    detail: run.detail,
    links: await page.evaluate(() => [...window.app.graph.links.values()].map((l) => [Number(l.origin_id), Number(l.target_id)])),
    wanted: [
      [model, blocks],
      [blocks, report],
    ].map((link) => link.map(Number)),
    report: await page.locator(".h3bw-report").allTextContents(),
  };
}

/** A workflow is queued with the panel open: its states on the way, its lines at the end, the text on the nodes. */
async function run(session) {
  const { page, options } = session;
  await session.load(options.workflow);
  await session.fit();
  const values = () => page.evaluate(() => window.app.graph.serialize().nodes.map((n) => [n.id, n.widgets_values]));
  const before = await values();
  await session.openPanel();
  const idle = await session.panelLines();
  await page.evaluate(() => {
    window.h3bwStates = [];
    new MutationObserver(() => {
      const state = document.querySelector(".h3bw-state")?.className.split("h3bw-state-")[1];
      if (state && window.h3bwStates.at(-1) !== state) window.h3bwStates.push(state);
    }).observe(document.querySelector(".h3bw-panel"), { childList: true, subtree: true });
  });
  const queued = await session.queue();
  await session.frames(10);
  await session.fit();
  await session.photograph(options.picture);
  const after = await values();
  const panel = await session.panelLines();
  const onNodes = await page.evaluate(() =>
    Object.fromEntries(
      window.app.graph.nodes
        .map((node) => [node.id, node.widgets?.filter((w) => w.name.startsWith("h3bw_")).map((w) => w.element.textContent)])
        .filter(([, texts]) => texts?.length),
    ),
  );
  await session.load(await page.evaluate(() => window.app.graph.serialize()));
  return {
    ended: queued.ended,
    detail: queued.detail,
    messages: queued.messages,
    idle,
    states: await page.evaluate(() => window.h3bwStates),
    panel,
    onNodes,
    labels: await page.evaluate(() =>
      Object.fromEntries(window.app.graph.nodes.map((node) => [node.type, node.widgets?.map((w) => w.label ?? w.name)])),
    ),
    overflow: await page.evaluate(() => {
      const panel = document.querySelector(".h3bw-panel");
      return panel.scrollWidth - panel.clientWidth;
    }),
    saved: { before, after, again: await values() },
  };
}

/** A workflow file is opened: what its widgets hold then, by name. */
async function open(session) {
  const { page, options } = session;
  await session.load(options.workflow);
  await session.fit();
  await session.photograph(options.picture);
  return {
    titles: await page.evaluate(() => window.app.graph.nodes.map((node) => node.title)),
    missing: await page.evaluate(() => window.app.graph.nodes.filter((node) => node.has_errors).map((node) => node.type)),
    widgets: await page.evaluate(() =>
      Object.fromEntries(
        window.app.graph.nodes.map((node) => [
          node.id,
          Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value])),
        ]),
      ),
    ),
    links: await page.evaluate(() => [...window.app.graph.links.values()].length),
  };
}

/** Hostile names everywhere a name can come from. */
async function hostile(session) {
  const { page, options } = session;
  await session.load(options.workflow);
  await session.openPanel();
  const message = structuredClone(options.message);
  await page.evaluate(
    ({ message, html }) => {
      const { app } = window;
      for (const node of app.graph.nodes) if (node.type.startsWith("H3BW_")) node.title = html;
      app.api.dispatchCustomEvent("h3bw.status", message);
      const report = app.graph.nodes.find((node) => node.type === "H3BW_RuntimeReport");
      app.api.dispatchCustomEvent("executed", { node: String(report.id), output: { text: [html] } });
    },
    { message, html: HOSTILE },
  );
  await session.frames(10);
  await session.photograph("hostile");
  return {
    html: HOSTILE,
    pwned: await page.evaluate(() => window.h3bwPwned ?? null),
    elements: await page.evaluate(() => document.querySelectorAll(".h3bw-panel img, .h3bw-panel b, .h3bw-text *").length),
    panel: await page.locator(".h3bw-panel").textContent(),
    onNodes: await page.locator(".h3bw-text").allTextContents(),
  };
}

/** An event that is none of ours, or one of a later version, is left alone. */
async function foreign(session) {
  const { page } = session;
  await session.load(EMPTY);
  await session.openPanel();
  const before = await session.panelLines();
  await page.evaluate(() => {
    for (const detail of [null, {}, { schema: "h3bw-status/2", state: "running" }, "text"]) {
      window.app.api.dispatchCustomEvent("h3bw.status", detail);
    }
    window.app.api.dispatchCustomEvent("executed", { node: "999", output: { text: ["x"] } });
  });
  await session.frames();
  return { before, after: await session.panelLines() };
}

/** Both settings off: no text of ours on any node. */
async function quiet(session) {
  const { page, options } = session;
  await session.load(options.workflow);
  const queued = await session.queue();
  return { ended: queued.ended, onNodes: await page.locator(".h3bw-text").allTextContents() };
}

/** A workflow is opened from the template browser; every one of ours has a picture there that loads. */
async function templates(session) {
  const { page, options } = session;
  await session.load(EMPTY);
  await page.evaluate(() => window.app.extensionManager.command.execute("Comfy.BrowseTemplates"));
  await page.getByText(options.pack, { exact: true }).first().click();
  const pictures = {};
  for (const name of options.names) {
    const card = page.getByTestId(`template-workflow-${name}`);
    await card.scrollIntoViewIfNeeded();
    await card.locator("img").first().evaluate((image) => image.decode());
    pictures[name] = await card.locator("img").first().evaluate((image) => image.naturalWidth);
  }
  await session.photograph("templates");
  await page.getByTestId(`template-workflow-${options.opened}`).click();
  await page.waitForFunction((kind) => window.app.graph.nodes.some((node) => node.type === kind), options.kind);
  await session.frames();
  return { pictures, nodes: await page.evaluate(() => window.app.graph.nodes.map((node) => node.type)) };
}

/** The info button of a selected node opens its docs. */
async function help(session) {
  const { page, options } = session;
  await session.load(options.workflow);
  await page.evaluate((kind) => {
    const { canvas, graph } = window.app;
    const node = graph.nodes.find((found) => found.type === kind);
    canvas.deselectAll();
    canvas.selectNode(node);
    canvas.centerOnNode(node);
  }, options.kind);
  await session.frames(10);
  await page.getByTestId("info-button").click();
  const content = page.locator(".node-help-content");
  await content.locator("table").first().waitFor();
  const image = content.locator("img").first();
  await image.evaluate((found) => found.decode());
  await session.photograph(`help-${options.settings["Comfy.Locale"]}`);
  return { text: await content.innerText(), picture: await image.evaluate((found) => found.naturalWidth) };
}

/** Our own complaint is seen: the other tests' empty lists mean something. */
async function complains(session) {
  await session.page.evaluate(() => console.error("H3 Blackwell: a test of the watch"));
  await session.page.evaluate(() => fetch("/extensions/h3-blackwell-runtime/none.js"));
  await session.frames();
  return {};
}

const SCENARIOS = { search, build, run, open, hostile, foreign, quiet, templates, help, complains };

const options = JSON.parse(process.argv[2]);
const session = await Session.open(options);
try {
  const result = await SCENARIOS[options.scenario](session);
  console.log(JSON.stringify({ ...result, complaints: session.complaints(), outside: session.outside }));
} catch (error) {
  await session.photograph(`failed-${options.scenario}`);
  console.error(String(error.stack ?? error), "\n", session.errors.join("\n"));
  process.exitCode = 1;
} finally {
  await session.close();
}
