// Runs before the page is drawn, so that a theme that was chosen doesn't come with a flash.
"use strict";
try {
  const chosen = localStorage.getItem("tieredkv-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is forbidden: the system's theme it is.
}
