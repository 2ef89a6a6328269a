// Output that is a table keeps its columns and scrolls; other output wraps where the page ends.
for (const code of document.querySelectorAll("pre > code")) {
  if (/[┃│]/.test(code.textContent)) code.classList.add("columns");
}
