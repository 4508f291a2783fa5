"""The plots of the stories, as data: beats with alternatives that `stories.py` fills in and joins.

Slots: {hero}, {friend} (children), {elder} (a resident), {item} "red kite", {thing} "kite",
{animal},
{place}, {other} (another place), {spot} (somewhere at the place), {food},
{few} and {many} (numbers,
many = 2 * few), and each plot's own choices. An empty alternative may leave its beat out.
"""

from __future__ import annotations

from dataclasses import dataclass

Beat = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """One plot: its beats in order, what it is about, what can be asked, and how it ends."""

    name: str
    topics: Beat
    beats: tuple[Beat, ...]
    questions: tuple[tuple[str, str], ...]
    summary: str
    ending: str  # a key of stories.ENDINGS
    choices: tuple[dict[str, str], ...] = ({},)


LOST = Plot(
    "lost",
    ("a lost {thing}", "{item.a}", "something that was lost", "{hero.name} and a lost {thing}"),
    (
        ("{hero.He} had {item.a} that {hero.he} loved very much.",
         "{hero.His} grandmother had given {hero.him} {item.a}.",
         "{hero.His} favourite thing in the world was {item.a}."),
        ("{time}, the {thing} was gone.", "{time}, {hero} could not find the {thing}.",
         "{time}, {hero.he} looked for the {thing}, but it was not there."),
        ("", "{weather}"),
        ("{hero} felt very sad.", "{hero} did not know what to do.", "{hero} began to cry."),
        ("First {hero.he} looked at {other}, but the {thing} was not there.",
         "{hero.He} searched at {other} for an hour and found nothing.", ""),
        ("Then {hero.he} met {friend}.", "On the way {hero.he} met {friend}.",
         "{friend} saw that {hero} was unhappy."),
        ('"What are you looking for?" asked {friend}.', '"Why are you so sad?" asked {friend}.'),
        ('"I have lost my {thing}," said {hero}.', '"My {item} is gone," said {hero}.'),
        ('"Do not worry. We will find it together," said {friend}.',
         '"Let us look at {place}," said {friend}.'),
        ("They hurried to {place}.", "{hero} and {friend} went to {place} together."),
        ("At last {friend} saw something {spot}.", "They looked everywhere.",
         "They turned over every stone."),
        ("There, {spot}, lay the {item}!", "It was the {item}, {spot}!"),
    ),
    (("What did {hero} lose?", "{hero} lost {item.a}."),
     ("Where was the {thing}?", "The {thing} was at {place}, {spot}."),
     ("Who helped {hero}?", "{friend} helped {hero}."),
     ("Why was {hero} sad?", "{hero} was sad because the {thing} was lost.")),
    "{hero} lost {item.a}, and {friend} helped {hero.him} find it at {place}.",
    "help",
)  # fmt: skip

STUCK = Plot(
    "stuck",
    ("{animal.a} that was stuck", "{animal.a}", "a brave {hero.child} and {animal.a}"),
    (
        ("{time}, {hero.he} was walking near {place}.", "{time}, {hero} was playing near {place}."),
        ("", "{weather}"),
        ("Suddenly {hero.he} heard a strange sound.", "All at once {hero.he} stopped and listened.",
         "Then {hero.he} heard somebody crying."),
        ("It was {animal.a}, and it was stuck {trap}.", "A little {animal} was stuck {trap}."),
        ('"Poor little {animal}!" said {hero}.', '"Do not be afraid," said {hero}.'),
        ("{hero} pulled and pulled, but it was no use.",
         "{hero} tried to help it alone, but {hero.he} was not strong enough."),
        ("So {hero.he} ran to {elder.title}." , "So {hero.he} called {elder.title} for help."),
        ('"I have a {tool}," said {elder}. "Come quickly!"',
         '"We need a {tool}," said {elder}.'),
        ("Together they {rescue}.", "{elder} and {hero} {rescue}."),
        ("The {animal} was free!", "At last the {animal} was safe."),
        ("From then on the {animal} followed {hero} everywhere.",
         "The {animal} looked at {hero} as if to say thank you.",
         "The {animal} ran happily back home."),
    ),
    (("Which animal was stuck?", "{animal.A} was stuck {trap}."),
     ("Where was the {animal} stuck?", "The {animal} was stuck {trap} near {place}."),
     ("Who helped {hero}?", "{elder} helped {hero}."),
     ("What did {elder} bring?", "{elder} brought a {tool}.")),
    "{hero} found {animal.a} stuck {trap}, and {elder} came with a {tool} to free it.",
    "help",
    ({"trap": "in a deep hole", "tool": "rope", "rescue": "pulled it out with the rope"},
     {"trap": "in a thorn bush", "tool": "knife", "rescue": "cut the branches one by one"},
     {"trap": "on a roof", "tool": "ladder", "rescue": "climbed up and carried it down"},
     {"trap": "in the mud", "tool": "board", "rescue": "laid down the board and lifted it out"},
     {"trap": "in an old net", "tool": "pair of scissors", "rescue": "cut the net open"}),
)  # fmt: skip

SHARE = Plot(
    "share",
    ("sharing", "{food}", "two hungry children", "{hero.name} and {many} {food}"),
    (
        ("{time}, {hero.his} mother gave {hero.him} {many} {food}.",
         "{time}, {hero} bought {many} {food} at the market.",
         "{time}, {hero.he} found {many} {food} in the kitchen."),
        ("{hero.He} put the {food} into a basket and went to {place}.",
         "{hero} wanted to eat them all, and sat down at {place}."),
        ("There {hero.he} saw {friend}, who was hungry.",
         "{friend} was sitting there with nothing to eat."),
        ('"I forgot my lunch," said {friend}.', '"Those {food} look very good," said {friend}.'),
        ("{hero} thought about it for a moment.",
         "{hero} looked at the {food} and then at {friend}."),
        ('"Half of them are for you," said {hero}.', '"Let us share," said {hero}.'),
        ("So {hero} gave {friend} {few} {food} and kept {few}.",
         "Each of them got {few} {food}."),
        ("They sat in the grass and ate.", "The {food} tasted better than ever.",
         "They ate and told each other stories."),
    ),
    (("How many {food} did {hero} have at first?", "{hero} had {many} {food} at first."),
     ("How many {food} did {friend} get?", "{friend} got {few} {food}."),
     ("Why did {hero} share the {food}?", "{hero} shared the {food} because {friend} was hungry."),
     ("Where did {hero} meet {friend}?", "{hero} met {friend} at {place}.")),
    "{hero} had {many} {food} and shared them with {friend}.",
    "share",
)  # fmt: skip

TRUTH = Plot(
    "truth",
    ("a broken {broken}", "telling the truth", "a {hero.child} who broke a {broken}"),
    (
        ("{time}, {hero} was playing near {elder}'s house.",
         "{time}, {hero} was visiting {elder}."),
        ("{hero.He} was not looking, and the {broken} fell down.",
         "{hero.He} threw a ball too hard. Crash!", "{hero.He} ran too fast and hit the {broken}."),
        ("{elder}'s {broken} was broken.", "The {broken} broke into a hundred pieces."),
        ("{hero}'s heart beat fast.", "At first {hero} wanted to run away.",
         "{hero} was afraid and hid behind a tree."),
        ('"You should tell the truth," said {friend}.',
         '"Go and tell {elder}. I will come with you," said {friend}.'),
        ("{hero} took a deep breath and went to {elder.title} who was at work.",
         "So {hero} went to {elder} and knocked on the door."),
        ('"I broke your {broken}. I am sorry," said {hero}.',
         '"It was me," said {hero}. "I broke the {broken}."'),
        ("{elder} was not angry.", "{elder} was quiet for a moment and then smiled."),
        ('"It was brave of you to tell me," said {elder}.',
         '"Thank you for telling me the truth," said {elder}.'),
        ("{hero} promised to {mend}, and {hero.he} kept the promise.",),
    ),
    (("What did {hero} break?", "{hero} broke the {broken}."),
     ("Whose {broken} was it?", "It was {elder}'s {broken}."),
     ("What did {hero} promise?", "{hero} promised to {mend}."),
     ("Was {elder} angry?", "No, {elder} was not angry, because {hero} told the truth.")),
    "{hero} broke {elder}'s {broken}, told the truth, and promised to {mend}.",
    "truth",
    tuple({"broken": broken, "mend": mend} for broken, mend in (
        ("window", "sweep the floor for three days"), ("vase", "water the garden for a week"),
        ("lantern", "help to mend it"), ("plate", "wash the dishes"),
        ("chair", "carry wood for the fire"), ("fence", "paint it again"))),
)  # fmt: skip

STORM = Plot(
    "storm",
    ("a storm", "a storm at the harbour", "a night of wind and rain",
     "a brave {hero.child} in a storm"),
    (
        ("{time}, {hero} and {friend} were playing at {place}.",
         "{time}, {hero} went to {place} with {friend}."),
        ("Dark clouds came over the hill.", "The wind grew stronger and stronger."),
        ("Then the storm began.", "Thunder rolled over the village, and rain came down."),
        ("{friend} was afraid and held {hero}'s hand.",
         "{hero} was frightened too, but did not show it."),
        ('"We must find a roof," said {hero}.', '"Follow me!" cried {hero}.'),
        ("They ran to {shelter} and shut the door.", "They found {shelter} and crept inside."),
        ("Inside sat {animal.a}, wet and trembling.",
         "{animal.A} was there too, shaking with cold."),
        ("{hero} dried the {animal} with {hero.his} scarf.",
         "{friend} gave the {animal} some bread."),
        ("They sang songs until the storm was over.",
         "They told each other jokes until the rain stopped."),
        ("Then {elder.title} came with a lantern and took them home.",
         "At last {elder} found them and brought them home."),
    ),
    (("Where did they hide?", "They hid in {shelter}."),
     ("Which animal was there?", "{animal.A} was there."),
     ("Who found the children?", "{elder} found them and brought them home."),
     ("Who was with {hero}?", "{friend} was with {hero}.")),
    "{hero} and {friend} hid from a storm in {shelter} until {elder} came.",
    "brave",
    tuple({"shelter": shelter} for shelter in (
        "an old barn", "the empty mill", "a small cave", "a boat house", "a shepherd's hut")),
)  # fmt: skip

LEARN = Plot(
    "learn",
    ("learning to {skill}", "a {hero.child} who learned to {skill}",
     "{elder.name} and {hero.name}"),
    (
        ("{hero} wanted to learn to {skill}.", "More than anything, {hero} wished to {skill}."),
        ("{time}, {hero.he} went to {elder.title} and asked for help.",
         "{time}, {hero.he} knocked on {elder}'s door."),
        ('"Can you teach me to {skill}?" asked {hero}.',
         '"Please show me how to {skill}," said {hero}.'),
        ('"It takes time," said {elder}.', '"Gladly," said {elder}, "but you must be patient."'),
        ("On the first day everything went wrong.", "At first {hero} was very bad at it."),
        ("On the second day it was a little better.",
         "{hero} wanted to give up, but {elder} shook {elder.his} head.",
         ""),
        ("{hero} practised every day for {few} weeks.",
         "For {few} weeks {hero} tried again and again."),
        ("{friend} laughed at first, but {hero} did not stop.", "{friend} came every day to watch.",
         ""),
        ("Then, {time_low}, it worked!", "At last {hero} could {skill}!"),
        ("The whole village clapped.", "{elder} was very proud.",
         "{friend} could hardly believe it."),
    ),
    (("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
     ("Who taught {hero}?", "{elder} taught {hero}."),
     ("How long did {hero} practise?", "{hero} practised for {few} weeks.")),
    "{hero} learned to {skill} with the help of {elder}.",
    "work",
    tuple({"skill": skill} for skill in (
        "swim", "bake bread", "play the flute", "ride a horse", "row a boat", "juggle", "dance",
        "build a chair", "whistle", "read the stars")),
)  # fmt: skip

GIFT = Plot(
    "gift",
    ("a birthday", "a present for {elder.name}", "a surprise", "{item.a} for {elder.name}"),
    (
        ("It was {elder}'s birthday, but {hero} had no money for a present.",
         "{hero} wanted to give {elder.title} something for {elder.his} birthday."),
        ('"What shall we do?" {hero} asked {friend}.', '"I have an idea," said {friend}.'),
        ('"We can make {item.a} ourselves," said {friend}.',
         '"Let us make {item.a}!" said {hero}.'),
        ("They worked at {place} the whole afternoon.",
         "All day they cut and glued and painted at {place}."),
        ("{hero} painted it, and {friend} tied a ribbon around it.",
         "It was a little crooked, but it was beautiful."),
        ("{time}, they knocked on {elder}'s door.", "In the evening they went to {elder}'s house."),
        ('"Happy birthday!" they cried.', "They sang a birthday song."),
        ("{elder} opened the present and found {item.a}.",
         "When {elder} saw the {thing}, {elder.he} laughed with joy."),
        ('"This is the best present of all," said {elder}.',
         '"You made this yourselves? It is wonderful," said {elder}.'),
    ),
    (("What did they make?", "They made {item.a}."),
     ("Who was the present for?", "The present was for {elder}."),
     ("Where did they work?", "They worked at {place}."),
     ("Who helped {hero}?", "{friend} helped {hero}.")),
    "{hero} and {friend} made {item.a} for {elder}'s birthday.",
    "kind",
)  # fmt: skip

NOISE = Plot(
    "noise",
    ("a strange noise", "a noise in the night", "a {hero.child} who was afraid of the dark"),
    (
        ("{hero} did not like the dark.", "One night {hero} could not sleep."),
        ("Every night there was a strange noise: {sound}.", "Something outside went {sound}."),
        ('"It must be a ghost," thought {hero}.',
         "{hero} pulled the blanket over {hero.his} head."),
        ("The next day {hero} told {friend} about it.", "In the morning {hero} went to {friend}."),
        ('"Let us find out what it is," said {friend}.',
         '"I do not believe in ghosts," said {friend}.'),
        ("That night they took a lantern and went outside.",
         "At midnight they crept out with a small lamp."),
        ("The noise came from {place}.", "Step by step they followed the noise to {place}."),
        ("{hero} held up the light with a shaking hand.",
         "{friend} went first, and {hero} followed."),
        ("There, {spot}, sat {animal.a}!", "It was only {animal.a}, {spot}!"),
        ("{hero} began to laugh.", '"So you are the ghost!" said {hero}.'),
    ),
    (("What was the noise?", "The noise came from {animal.a}."),
     ("Where was the {animal}?", "The {animal} was at {place}, {spot}."),
     ("Who went with {hero}?", "{friend} went with {hero}."),
     ("What did {hero} think it was?", "{hero} thought it was a ghost.")),
    "{hero} and {friend} followed a strange noise and found {animal.a} at {place}.",
    "brave",
    tuple({"sound": sound} for sound in ("tap, tap, tap", "hoo, hoo", "scratch, scratch",
                                         "bump, bump")),
)  # fmt: skip

CONTEST = Plot(
    "contest",
    ("a contest", "a {contest}", "a {hero.child} who wanted to win"),
    (
        ("Every year there was a {contest} in Willowmere.",
         "On Saturday there was a {contest} at {place}."),
        ("{hero} wanted to win the first prize, {item.a}.",
         "The prize was {item.a}, and {hero} wanted it badly."),
        ("{hero.He} got ready for {few} days.", "{elder.title} gave {hero.him} good advice." , ""),
        ("{weather}", ""),
        ("The contest began, and {hero} was in front.", "Everyone cheered when the contest began."),
        ("Then {friend} fell down and hurt {friend.his} knee.",
         "Then {hero} saw that {friend} was in trouble."),
        ("{hero} stopped at once and helped {friend}.",
         "{hero} turned around and went back to {friend}."),
        ('"You will lose!" said {friend}.', '"But what about the prize?" asked {friend}.'),
        ('"That does not matter," said {hero}.', '"You are more important," said {hero}.'),
        ("They came in last, but everybody clapped.",
         "{hero} did not win, but {hero.he} was not sad."),
        ("In the end {elder} gave {hero} the {thing} for being a good friend.",
         "{elder} said that {hero} had earned the {thing} all the same."),
    ),
    (("What was the prize?", "The prize was {item.a}."),
     ("What kind of contest was it?", "It was a {contest}."),
     ("Why did {hero} stop?", "{hero} stopped to help {friend}."),
     ("Who gave {hero} the {thing}?", "{elder} gave {hero} the {thing}.")),
    "{hero} gave up winning a {contest} to help {friend}, and got {item.a} all the same.",
    "help",
    tuple({"contest": contest} for contest in (
        "boat race", "running race", "kite contest", "swimming race", "sledge race",
        "donkey race")),
)  # fmt: skip

FIRST_PLOTS = (LOST, STUCK, SHARE, TRUTH, STORM, LEARN, GIFT, NOISE, CONTEST)
