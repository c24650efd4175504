// The button with the id "theme": as the system has it, dark or light; for every page of one browser.
const preference = matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
try { theme = localStorage.getItem("fourfold-theme") || "auto"; } catch { /* some browsers refuse storage, to files most of all */ }

function showTheme() {
  const dark = theme === "dark" || (theme === "auto" && preference.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = "Theme: " + theme;
}
$("theme").addEventListener("click", () => {
  theme = { auto: "dark", dark: "light", light: "auto" }[theme] || "auto";
  try { localStorage.setItem("fourfold-theme", theme); } catch { /* as above */ }
  showTheme();
});
preference.addEventListener("change", showTheme);
