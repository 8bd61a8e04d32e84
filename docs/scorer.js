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

/* The words of a query that a page is searched for. Sphinx wants all of them on one page. If no page has all, these are
 * the words of the page that has the most, of which rare ones count more. So a whole question finds something. */
var splitQuery = (query) => {
  const words = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((word) => word);
  const index = Search._index;
  if (!index) return words;
  const asked = words.filter((word) => !stopwords.has(word.toLowerCase()) && !/^\d+$/.test(word));
  const stemmer = new Stemmer();
  const filesOf = (word) => {
    const tables = [index.terms, index.titleterms];
    const exact = tables.filter((table) => Object.hasOwn(table, word)).map((table) => table[word]);
    if (exact.length || word.length < 3) return new Set(exact.flat());
    return new Set(tables.flatMap((table) => Object.keys(table).filter((term) => term.includes(word)).flatMap((term) => table[term])));
  };
  const found = new Map(asked.map((word) => [word, filesOf(stemmer.stemWord(word.toLowerCase()))]));
  const weights = new Map(); // by file
  for (const files of found.values()) {
    const weight = Math.log(1 + index.docnames.length / files.size);
    for (const file of files) weights.set(file, (weights.get(file) || 0) + weight);
  }
  const best = Math.max(...weights.values());
  const file = [...weights.keys()].find((file) => weights.get(file) === best);
  return asked.filter((word) => found.get(word).has(file));
};
