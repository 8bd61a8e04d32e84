/* How the site's search finds pages and orders them. Sphinx takes pages that have all words of a query, and orders them
 * by one of the words. Here each word counts, a rare one and one of a heading more, so that a whole question finds the
 * pages that answer it. */

/* The words of a query that are searched for, the files that have each, and each file's weight. */
const weighed = (query) => {
  const words = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((word) => word);
  const asked = words.filter((word) => !stopwords.has(word.toLowerCase()) && !/^\d+$/.test(word));
  const tables = [Search._index.terms, Search._index.titleterms];
  const stemmer = new Stemmer();
  const filesOf = (word) => {
    const exact = tables.filter((table) => Object.hasOwn(table, word)).map((table) => table[word]);
    if (exact.length || word.length < 3) return new Set(exact.flat());
    const inside = (table) => Object.keys(table).filter((term) => term.includes(word)).flatMap((term) => table[term]);
    return new Set(tables.flatMap(inside));
  };
  const found = new Map();
  const weights = new Map();
  for (const word of new Set(asked)) {
    const stem = stemmer.stemWord(word.toLowerCase());
    const files = filesOf(stem);
    const headed = Object.hasOwn(tables[1], stem) ? new Set([tables[1][stem]].flat()) : new Set();
    const weight = Math.log(1 + Search._index.docnames.length / files.size);
    for (const file of files) weights.set(file, (weights.get(file) || 0) + (headed.has(file) ? 2 : 1) * weight);
    found.set(word, files);
  }
  return { asked, found, weights };
};

/* Words that the three best pages share: those pages are among the results then, and others that are as good. */
var splitQuery = (query) => {
  const { asked, found, weights } = weighed(query);
  const best = [...weights.keys()].sort((a, b) => weights.get(b) - weights.get(a)).slice(0, 3);
  const having = (files) => asked.filter((word) => files.every((file) => found.get(word).has(file)));
  const shared = having(best);
  return shared.length ? shared : having(best.slice(0, 1));
};

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
    const file = Search._index.docnames.indexOf(docname);
    const { weights } = weighed(new URLSearchParams(window.location.search).get("q") || "");
    return score + 3 * (weights.get(file) || 0) + (/^(guides|start)\//.test(docname) ? 1 : 0);
  },
};
