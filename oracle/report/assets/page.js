"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("fp8-oracle-theme"); } catch { return null; } };
  const store = (name) => { try { localStorage.setItem("fp8-oracle-theme", name); } catch { /* not allowed here */ } };
  const show = (name) => {
    if (name === "system") delete root.dataset.theme; else root.dataset.theme = name;
    if (button) button.textContent = `Theme: ${name}`;
  };
  const asked = new URLSearchParams(location.search).get("theme");
  let theme = [asked, stored(), "system"].find((name) => themes.includes(name));
  show(theme);
  if (button) {
    button.hidden = false;
    button.addEventListener("click", () => {
      theme = themes[(themes.indexOf(theme) + 1) % themes.length];
      store(theme);
      show(theme);
    });
  }

  const copy = async (code) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      return true;
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      const selection = getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
      return document.execCommand("copy");
    }
  };
  for (const one of document.querySelectorAll("button.copy")) {
    one.hidden = false;
    one.addEventListener("click", async () => {
      one.textContent = await copy(one.previousElementSibling) ? "Copied" : "Selected";
      setTimeout(() => { one.textContent = "Copy"; }, 1500);
    });
  }

  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", open);
  open();

  const filter = document.getElementById("filter");
  if (filter) {
    filter.closest(".filter").hidden = false;
    const groups = [...document.querySelectorAll("#cases details")].map((group) => ({
      group, title: group.querySelector("summary").textContent.toLowerCase(),
      rows: [...group.querySelectorAll("tbody tr")].map((row) => ({ row, text: row.textContent.toLowerCase() })),
    }));
    const count = document.getElementById("filtered");
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const { group, title, rows } of groups) {
        let here = 0;
        for (const { row, text } of rows) {
          row.hidden = !words.every((word) => text.includes(word) || title.includes(word));
          here += !row.hidden;
        }
        group.hidden = here === 0;
        group.open = words.length > 0 && here > 0 && here <= 200;
        shown += here;
      }
      count.textContent = words.length ? `${shown} cases` : "";
    };
    let waiting = 0;
    filter.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 120); });
  }
})();
