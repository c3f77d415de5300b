"use strict";
// Titles become tips that show at once and follow the pointer. Text only: what a title holds is never read as markup.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const texts = new WeakMap();
  for (const title of document.querySelectorAll("svg title")) {
    texts.set(title.parentNode, title.textContent);
    title.remove();
  }
  const textAt = (node) => {
    for (; node && node !== document; node = node.parentNode) if (texts.has(node)) return texts.get(node);
    return null;
  };
  document.addEventListener("pointermove", (event) => {
    const text = textAt(event.target);
    tip.hidden = text === null;
    if (text === null) return;
    if (tip.textContent !== text) tip.textContent = text;
    const box = tip.getBoundingClientRect();
    const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
    const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
    tip.style.left = Math.max(left, 4) + "px";
    tip.style.top = Math.max(top, 4) + "px";
  });
  const links = [...document.querySelectorAll("nav .links a")];
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links) link.classList.toggle("here", link.hash === "#" + entry.target.id);
      }
    },
    { rootMargin: "-15% 0px -75% 0px" },
  );
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
})();
