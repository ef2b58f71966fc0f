// A plain script in the head: it runs before anything is painted, so that a chosen theme never flashes.
try {
  const theme = localStorage.getItem("afm-mlx theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // the browser keeps nothing for this page: the system's theme holds
}
