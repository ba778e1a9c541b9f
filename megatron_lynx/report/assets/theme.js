// Light or dark: as the system has it, until the reader chooses.

class Theme {
  constructor(button) {
    this.chosen = "auto";
    this.listeners = [];
    this.system = window.matchMedia("(prefers-color-scheme: dark)");
    this.system.addEventListener("change", () => this.apply());
    button.addEventListener("click", () => {
      this.chosen = { auto: this.system.matches ? "light" : "dark", light: "dark", dark: "light" }[this.chosen];
      this.apply();
    });
    this.button = button;
    this.apply();
  }

  get dark() {
    return this.chosen === "auto" ? this.system.matches : this.chosen === "dark";
  }

  apply() {
    if (this.chosen !== "auto") document.documentElement.dataset.theme = this.chosen;
    this.button.textContent = this.dark ? "Light" : "Dark";
    const style = getComputedStyle(document.documentElement);
    this.named = Object.fromEntries(["page", "panel", "line", "text", "soft", "accent", "mark", "bad"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.listeners.forEach((listener) => listener());
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  colour(kind) {
    return this.dark ? kind.dark : kind.light;
  }

  // 0xAABBGGRR, as a canvas's pixels have it on every machine that browsers run on today.
  pixel(kind) {
    const value = parseInt(this.colour(kind).slice(1), 16);
    return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
  }
}
