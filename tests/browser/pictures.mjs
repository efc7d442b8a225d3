// Photographs workflows and nodes in ComfyUI's page, for make_pictures.py: the argument is a JSON file, see there.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { Session } from "./page.mjs";

const EDGE = 24; // pixels
const BARE = `
  body > *:not(#vue-app):not(canvas) { display: none !important; }
  .graph-canvas-panel, .side-toolbar-container, .workflow-tabs-container, .minimap-main-container { display: none !important; }
`;

const options = JSON.parse(readFileSync(process.argv[2], "utf8"));
const session = await Session.open(options);
try {
  const { page } = session;
  await page.evaluate(() => window.app.extensionManager.command.execute("Workspace.ToggleFocusMode"));
  await page.addStyleTag({ content: BARE });
  await page.evaluate(() => {
    window.app.canvas.show_info = false;
  });
  let open = null;
  for (const { workflow, ids, path } of options.wanted) {
    if (workflow !== open) {
      await session.load(options.workflows[workflow]);
      if (options.run.includes(workflow)) {
        const { ended, detail } = await session.queue();
        if (ended !== "success") throw new Error(`${workflow} ended as ${ended}: ${JSON.stringify(detail)}`);
      }
      open = workflow;
    }
    const place = await session.fit(ids ?? undefined);
    await page.mouse.move(3, 3);
    await session.frames(10);
    // A node's picture ends where its neighbours do; a workflow's has the shape of a card.
    const clip = { x: place.x - EDGE, y: place.y - EDGE, width: place.width + 2 * EDGE, height: place.height + 2 * EDGE };
    await page.screenshot({ path: join(options.folder, path), ...(ids ? { clip } : {}) });
  }
} finally {
  await session.close();
}
