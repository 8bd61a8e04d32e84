/* How the site's search orders pages: those that answer a question before those that mention a word. */
var Scorer = {
  // Sphinx's own scores
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([docname, title, anchor, description, score, filename, kind]) => {
    if (kind !== "text") return score;
    if (/^(benchmarks|changelog|contributing|roadmap)/.test(docname)) return score / 4;
    // Sphinx takes the best word of a query. Here each word that stands in a heading counts, so that ties are rare.
    const stemmer = new Stemmer();
    const words = splitQuery(new URLSearchParams(window.location.search).get("q") || "");
    const headed = new Set(words.map((word) => stemmer.stemWord(word.toLowerCase())));
    const file = Search._index.docnames.indexOf(docname);
    for (const word of headed) {
      const files = Search._index.titleterms[word];
      if (files === file || (Array.isArray(files) && files.includes(file))) score += 2;
    }
    return score + (/^(guides|start)\//.test(docname) ? 1 : 0);
  },
};
