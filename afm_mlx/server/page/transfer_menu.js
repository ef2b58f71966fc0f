/** The menus that export and import conversations. */
import { byId, toast } from "./dom.js";
import { download, fileName, fromJson, toJson, toMarkdown } from "./transfer.js";

const LARGEST_FILE = 64 * 1024 * 1024; // bytes

export function bindTransfer(app) {
  byId("export-markdown").addEventListener("click", () => {
    download(fileName(app.current.title, "md"), "text/markdown", toMarkdown(app.current));
  });
  byId("export-json").addEventListener("click", () => {
    download(fileName(app.current.title, "json"), "application/json", toJson([app.current]));
  });
  byId("export-all").addEventListener("click", () => {
    download("afm-mlx-chats.json", "application/json", toJson([...app.conversations.values()]));
  });
  const field = byId("import-file");
  byId("import").addEventListener("click", () => field.click());
  field.addEventListener("change", async () => {
    const [file] = field.files;
    field.value = "";
    if (file) await importFile(app, file);
  });
}

async function importFile(app, file) {
  let found;
  try {
    if (file.size > LARGEST_FILE) throw new Error("The file has more than 64 MB.");
    found = fromJson(await file.text());
  } catch (error) {
    toast(`${file.name} was not imported. ${error.message}`);
    return;
  }
  for (const conversation of found) {
    app.add(conversation);
    await app.save(conversation);
  }
  if (!found.length) return toast(`${file.name} holds no chats.`);
  app.open(found[0].id);
  toast(found.length === 1 ? "One chat was imported." : `${found.length} chats were imported.`);
}
