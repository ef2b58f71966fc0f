/** The switch between the system's theme, light and dark; theme.js reads what it keeps. */
const KEY = "afm-mlx theme";

export function bindThemeSwitch() {
  const buttons = [...document.querySelectorAll("[data-set-theme]")];
  const show = () => {
    const theme = document.documentElement.dataset.theme ?? "system";
    for (const button of buttons)
      button.setAttribute("aria-pressed", button.dataset.setTheme === theme);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      setTheme(button.dataset.setTheme);
      show();
    });
  }
  show();
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // it holds until the page is closed
  }
}
