// Before the first paint: the theme that was chosen here, or none, which leaves it to the system.
(() => {
  try {
    const chosen = localStorage.getItem("lakebed-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage may be forbidden; then the system's theme it is
  }
})();
