/** Images of a message: read from files, made smaller where they are large, and shown. */
import { element, iconButton, toast } from "./dom.js";

const SENT_AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const LARGEST_BYTES = 1 << 20; // of a file that is sent as it is
const LONGEST_PX = 2048; // side of an image that is made smaller
const QUALITY = 0.92; // of its JPEG

/** A data URI as this page makes them; imported files may have others. */
export const isImage = (value) =>
  typeof value === "string" &&
  /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/.test(value);

/** The data URIs of image files. A notice is shown for each file that is none. */
export async function readImages(files) {
  const read = await Promise.all([...files].map(readImage));
  return read.filter((image) => image !== null);
}

async function readImage(file) {
  let bitmap = null;
  try {
    bitmap = await createImageBitmap(file);
    if (SENT_AS_THEY_ARE.includes(file.type) && file.size <= LARGEST_BYTES) return await dataUri(file);
    return smaller(bitmap);
  } catch {
    toast(`${file.name} is not an image that this browser can read.`);
    return null;
  } finally {
    bitmap?.close();
  }
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function smaller(bitmap) {
  const scale = Math.min(1, LONGEST_PX / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) =>
    Math.max(1, Math.round(side * scale)),
  );
  const canvas = element("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // a JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

/** Thumbnails; with `onremove(index)`, each has a button that removes it. */
export function thumbnails(images, onremove = null) {
  const item = (image, i) => {
    const name = `Image ${i + 1}`;
    const remove = onremove && iconButton("close", `Remove ${name}`, () => onremove(i));
    return element("li", {}, element("img", { src: image, alt: name, title: name }), remove);
  };
  const attributes = { class: "images", role: "list", "aria-label": "Images" };
  return element("ul", attributes, ...images.map(item));
}
