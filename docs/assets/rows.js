// Tables of few columns: a field that filters rows by their words, a choice of project and of verdict where rows have
// them, and cards on a narrow screen (extra.css).
for (const box of document.querySelectorAll(".rows")) {
  const rows = [...box.querySelectorAll("tbody tr")];
  const heads = [...box.querySelectorAll("thead th")].map((head) => head.textContent);
  const bar = document.createElement("form"), count = document.createElement("output");
  bar.className = "rows-bar";
  bar.addEventListener("submit", (event) => event.preventDefault());
  const tests = [];

  const add = (field, label, test) => {
    field.setAttribute("aria-label", label);
    field.addEventListener("input", show);
    bar.append(field);
    tests.push((row) => test(row, field.value));
  };
  const choose = (label, word) => {
    const words = [...new Set(rows.map(word))].filter(Boolean);
    if (words.length < 2 || words.length === rows.length) return;
    const field = document.createElement("select");
    field.append(new Option(label, ""), ...words.sort().map((text) => new Option(text)));
    add(field, label, (row, value) => !value || word(row) === value);
  };
  function show() {
    const left = rows.filter((row) => !(row.hidden = !tests.every((test) => test(row))));
    count.textContent = left.length === rows.length ? `${rows.length} rows` : `${left.length} of ${rows.length} rows`;
  }

  for (const row of rows) {
    for (const [column, cell] of [...row.cells].entries()) {
      if (column && cell.textContent.length < 24) cell.dataset.label = heads[column];
    }
    if (heads[0] === "verdict") row.cells[0].dataset.verdict = row.cells[0].textContent;
  }
  if (rows.length > 8) {
    const words = document.createElement("input");
    words.type = "search";
    words.placeholder = "filter";
    add(words, "rows that have these words", (row, value) =>
      value.toLowerCase().split(/\s+/).every((word) => row.textContent.toLowerCase().includes(word)));
    if (heads[0] === "verdict") choose("any verdict", (row) => row.cells[0].textContent);
    choose("any project", (row) => row.querySelector("strong")?.textContent);
    bar.append(count);
    box.prepend(bar);
    show();
  }
}
