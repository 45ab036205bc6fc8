#include "engine/provenance.h"

#include <gtest/gtest.h>

#include "tests/unit/store_fixture.h"

namespace carryover {
namespace {

const Digest kS = VersionNamed("S");
const Digest kT = VersionNamed("T");
const Digest kU = VersionNamed("U");

TEST(Provenance, NativeIsWhatAttendedToItselfAlone) {
  EXPECT_TRUE(ComputedOver(kT, {}).IsNative());
  EXPECT_EQ(ComputedOver(kT, {NativeOf(kT)}), NativeOf(kT));
  const Provenance tainted = ComputedOver(kT, {NativeOf(kT), NativeOf(kS)});
  EXPECT_FALSE(tainted.IsNative());
  EXPECT_EQ(tainted.computed_by, kT);
  EXPECT_EQ(tainted.sources, std::vector<Digest>{kS});
}

TEST(Provenance, TaintIsHandedOnOverUpdates) {
  const Provenance t = ComputedOver(kT, {NativeOf(kS)});
  const Provenance u = ComputedOver(kU, {t});
  EXPECT_EQ(u.sources.size(), 2u);
  EXPECT_TRUE(u.Involves(kS) && u.Involves(kT) && u.Involves(kU));
  EXPECT_TRUE(std::is_sorted(u.sources.begin(), u.sources.end()));
  // Its own tainted blocks do not become native by being attended to.
  EXPECT_EQ(ComputedOver(kT, {t}), t);
  EXPECT_FALSE(ComputedOver(kS, {t}).IsNative());
}

TEST(Provenance, AMapIsNeverNativeNorForgotten) {
  Provenance mapped = NativeOf(kT);
  mapped.map = "fit";
  EXPECT_FALSE(mapped.IsNative());
  EXPECT_FALSE(ComputedOver(kT, {mapped}).IsNative());
  EXPECT_EQ(ComputedOver(kT, {mapped}).map, "~fit");
  EXPECT_EQ(ComputedOver(kT, {ComputedOver(kT, {mapped}), mapped}).map, "~fit");
  EXPECT_TRUE(IsChanged(mapped));
  EXPECT_FALSE(IsChanged(ComputedOver(kT, {mapped})));
  EXPECT_EQ(MappedBy(NativeOf(kT), "fit"), mapped);
  EXPECT_EQ(MappedBy(ComputedOver(kT, {mapped}), "fit").map, "fit");
  EXPECT_EQ(ChangesIn(MappedBy(ComputedOver(kT, {mapped}), "cut")),
            (std::vector<std::string>{"cut", "fit"}));
}

TEST(ProvenanceRegistry, EqualIsEqualWhateverTheName) {
  ProvenanceRegistry registry;
  registry.NameVersion(kS, "2026-10");
  const ProvenanceId first = registry.Native(kS);
  registry.NameVersion(kS, "renamed");
  EXPECT_EQ(registry.Native(kS), first);
  EXPECT_NE(registry.Native(kT), first);
  EXPECT_EQ(registry.Intern(ComputedOver(kT, {NativeOf(kS), NativeOf(kU)})),
            registry.Intern(ComputedOver(kT, {NativeOf(kU), NativeOf(kS)})));
  EXPECT_EQ(registry.size(), 3);
}

TEST(ProvenanceRegistry, Names) {
  ProvenanceRegistry registry;
  registry.NameVersion(kS, "2026-10");
  registry.NameVersion(kT, "2026-11");
  EXPECT_EQ(registry.Name(registry.Native(kS)), "2026-10");
  EXPECT_EQ(registry.Name(registry.Intern(ComputedOver(kT, {NativeOf(kS)}))),
            "2026-11 over 2026-10");
  EXPECT_EQ(registry.Name(registry.Native(kU)), ShortHex(kU));
}

TEST(ProvenanceRegistry, CoversWhatIsNamed) {
  ProvenanceRegistry registry;
  const ProvenanceId s = registry.Native(kS);
  const ProvenanceId t = registry.Native(kT);
  const ProvenanceId t_over_s = registry.Intern(ComputedOver(kT, {NativeOf(kS)}));
  const ProvenanceId s_over_t = registry.Intern(ComputedOver(kS, {NativeOf(kT)}));
  EXPECT_TRUE(registry.Covers(t, t));
  EXPECT_FALSE(registry.Covers(t, s));
  EXPECT_FALSE(registry.Covers(t, t_over_s));
  EXPECT_TRUE(registry.Covers(t_over_s, s));
  EXPECT_TRUE(registry.Covers(t_over_s, t));
  EXPECT_TRUE(registry.Covers(t_over_s, s_over_t));
  Provenance mapped = NativeOf(kS);
  mapped.map = "fit";
  EXPECT_FALSE(registry.Covers(t_over_s, registry.Intern(mapped)));
}

TEST(Lineage, OnlyGainsTaint) {
  StoreFixture fixture(4);
  const Tokens tokens = SomeTokens(4);
  fixture.Serve("S", tokens);
  const std::optional<TableBlock> of_s =
      fixture.store->Use(fixture.store->Find(fixture.root, tokens).level(0)[0].entry);
  ASSERT_TRUE(of_s.has_value());

  Lineage lineage(&fixture.registry, kT);
  EXPECT_EQ(lineage.provenance(), fixture.Native("T"));
  lineage.Attend(of_s->origin);
  const ProvenanceId tainted = lineage.provenance();
  EXPECT_EQ(fixture.registry.Name(tainted), "T over S");
  lineage.Attend(Lineage(&fixture.registry, kT).current());
  EXPECT_EQ(lineage.provenance(), tainted);

  Lineage continued(&fixture.registry, kS);
  continued.ContinueAs(kT);
  EXPECT_EQ(continued.provenance(), tainted);
  continued.ContinueAs(kS);
  EXPECT_EQ(fixture.registry.Name(continued.provenance()), "S over T");
}

}  // namespace
}  // namespace carryover
