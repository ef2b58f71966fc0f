// A plain script in the head, which runs before the first paint, so that a chosen theme never flashes.
try {
  const theme = localStorage.getItem("afm-mlx theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // no storage: the system's theme applies
}
