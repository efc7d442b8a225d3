// The page's words for this pack, in the language that ComfyUI is set to: the section h3bw of locales/<language>/main.json.

const FALLBACK = "en";
let texts = {};

/** Reads them once, as ComfyUI merged them for all packs. Without them `text` gives the keys, which can be read too. */
export async function loadTexts(app) {
  try {
    const all = await app.api.getCustomNodesI18n();
    const language = app.extensionManager.setting.get("Comfy.Locale") ?? FALLBACK;
    texts = { ...all?.[FALLBACK]?.h3bw, ...all?.[language]?.h3bw };
  } catch (error) {
    console.warn("H3 Blackwell: the page's texts were not loaded", error);
  }
}

/** A text with its `{name}` parts filled in. */
export function text(key, values = {}) {
  const found = typeof texts[key] === "string" ? texts[key] : key.replaceAll("_", " ");
  return found.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}
