// Runs before the first paint, so that a dark page never flashes white.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("atoll-theme");
  } catch {
    // Without storage the system's choice holds.
  }
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
})();
