"""The fixed world of the demo model: the village of Willowmere, who lives there and what is known.

Everything here is a fact that the model learns by heart. What changes from text to text (stories,
notes) is made by `plots.py` and `notes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resident:
    """A grown-up of the village."""

    name: str
    female: bool
    job: str
    duty: str  # what the job is, as in "She bakes bread and cakes."
    workplace: str
    pet: str
    pet_name: str
    food: str
    door: str
    hobby: str


RESIDENTS = (
    Resident("Mira", True, "baker", "bakes bread and cakes", "bakery",
             "cat", "Pepper", "plum cake", "red", "singing"),
    Resident("Tobias", False, "miller", "grinds wheat into flour", "mill",
             "dog", "Rusty", "bread and cheese", "green", "fishing"),
    Resident("Agnes", True, "teacher", "teaches the children", "school",
             "owl", "Hoot", "honey", "blue", "reading"),
    Resident("Bruno", False, "fisherman", "catches fish in the lake", "harbour",
             "gull", "Salty", "fish soup", "white", "whistling"),
    Resident("Clara", True, "farmer", "grows wheat and looks after the cows", "farm",
             "horse", "Thunder", "apple pie", "yellow", "dancing"),
    Resident("Oscar", False, "blacksmith", "makes tools out of iron", "forge",
             "goat", "Biscuit", "roast potatoes", "black", "playing chess"),
    Resident("Nora", True, "doctor", "helps people who are ill", "clinic",
             "rabbit", "Clover", "carrot soup", "orange", "gardening"),
    Resident("Felix", False, "lighthouse keeper", "keeps the light burning for the boats",
             "lighthouse", "parrot", "Captain", "pancakes", "brown", "watching the stars"),
    Resident("Ida", True, "gardener", "looks after the apple trees", "orchard",
             "hedgehog", "Button", "strawberries", "pink", "painting"),
    Resident("Hugo", False, "postman", "brings letters to every house", "post office",
             "donkey", "Moss", "fresh cheese", "purple", "running"),
    Resident("Edith", True, "librarian", "looks after the books", "library",
             "mouse", "Comma", "toast and jam", "grey", "writing poems"),
    Resident("Samuel", False, "carpenter", "makes tables and chairs out of wood", "workshop",
             "duck", "Paddle", "onion soup", "silver", "building kites"),
)  # fmt: skip

WORKPLACES = {
    "bakery": "on the market square",
    "mill": "beside the river",
    "school": "next to the library",
    "harbour": "at the end of the long road",
    "farm": "behind the hill",
    "forge": "near the old bridge",
    "clinic": "across from the school",
    "lighthouse": "on the rocks beyond the harbour",
    "orchard": "on the sunny side of the hill",
    "post office": "beside the bakery",
    "library": "next to the school",
    "workshop": "at the edge of the forest",
}

VILLAGE = (
    (("What is Willowmere?", "What kind of place is Willowmere?", "Tell me about Willowmere.",
      "What do you know about Willowmere?", "Describe the village."),
     "Willowmere is a small village between a hill, a forest and a lake. A river runs through it."),
    (("Where is Willowmere?", "Where does the village lie?", "Where can I find Willowmere?",
      "In what place is Willowmere?"),
     "Willowmere lies between the hill, the forest and the lake."),
    (("What is the river called?", "What is the name of the river?",
      "Which river runs through the village?", "Name the river of Willowmere."),
     "The river that runs through Willowmere is called the Linn."),
    (("What is the lake called?", "What is the name of the lake?", "How is the lake called?",
      "Name the lake of Willowmere."),
     "The lake of Willowmere is called the Silver Mere."),
    (("What is the hill called?", "What is the name of the hill?", "Name the hill of Willowmere."),
     "The hill behind the village is called Beacon Hill."),
    (("What is the forest called?", "What is the name of the forest?",
      "Name the forest of Willowmere."),
     "The forest beside the village is called the Whispering Wood."),
    (("When is the lantern festival?", "When do people carry lanterns?",
      "On which day is the lantern festival?", "What time of year is the lantern festival?"),
     "The lantern festival is on the last evening of October."),
    (("What happens at the lantern festival?", "What do people do at the lantern festival?",
      "Tell me about the lantern festival.", "What is the lantern festival?"),
     "At the lantern festival everyone carries a paper lantern down to the lake and sings."),
    (("When is market day?", "On which day is the market?", "What day is the market?",
      "When can I go to the market?"),
     "Market day is on Saturday, on the square in front of the bakery."),
    (("How many people work in Willowmere?", "How many grown-ups are there in Willowmere?",
      "How many people live in Willowmere?"),
     "Twelve grown-ups work in Willowmere, and there are many children."),
    (("How old is the bridge?", "Who built the old bridge?", "What is special about the bridge?",
      "Tell me about the old bridge."),
     "The old bridge was built of grey stone two hundred years ago."),
    (("When does the bell ring?", "What does the village bell do?", "Tell me about the bell.",
      "How often does the bell of Willowmere ring?"),
     "The bell of Willowmere rings at noon and again at sunset."),
    (("What is the school famous for?", "What do children learn at school?",
      "What do the children learn in Willowmere?"),
     "The children of Willowmere learn to read, to count and to look at the stars."),
    (("How can I cross the river?", "How do I get across the river?",
      "How do people cross the river?"),
     "You can cross the river on the old bridge near the forge."),
    (("What can I do in Willowmere?", "What is there to see in Willowmere?",
      "What should I visit in Willowmere?"),
     "You can visit the market, swim in the lake, or climb to the lighthouse and see the boats."),
    (("Where can I buy bread?", "Where do people buy bread?", "Who sells bread?"),
     "You can buy bread from Mira at the bakery, on the market square."),
    (("Where can I borrow a book?", "Where do I get a book?", "Who can lend me a book?"),
     "You can borrow a book from Edith at the library, next to the school."),
    (("Who can help me when I am ill?", "I am ill. Where should I go?", "Where is a doctor?"),
     "Nora, the doctor, can help you at the clinic, across from the school."),
    (("Who can mend my chair?", "My chair is broken. Who can help?", "Who repairs tables?"),
     "Samuel, the carpenter, can mend it at the workshop, at the edge of the forest."),
)  # fmt: skip

GENERAL = (
    (("Why do sailing boats need wind?", "What makes a sailing boat move?"),
     "Sailing boats need wind because it pushes the sails."),
    (("Why is bread soft?", "What makes bread soft?"),
     "Bread is soft because there are small bubbles of air in the dough."),
    (("Why do we sleep?", "Why do people need sleep?"),
     "We sleep because our body and our mind need rest."),
    (("Why does it rain?", "Where does rain come from?", "What is rain?"),
     "Rain is water that falls when the clouds are full."),
    (("What is snow?", "Where does snow come from?"),
     "Snow is frozen water that falls from the clouds."),
    (("Why is there a lighthouse?", "What is a lighthouse for?", "What is a lighthouse?"),
     "A lighthouse is a tall tower whose bright light shows boats the way."),
    (("Why do birds sing?", "Why does a bird sing?"),
     "Birds sing to call each other and to say where they live."),
    (("How does the mill work?", "Why does the mill need water?", "How does a water mill work?"),
     "The river turns the big wheel, and the wheel turns the stones that grind the wheat."),
    (("Why do trees lose their leaves?", "Why do leaves fall in autumn?"),
     "Many trees lose their leaves in autumn because the days become short and cold."),
    (("Why do we need bees?", "What do bees do?", "What is a bee good for?"),
     "Bees carry pollen from flower to flower, so that fruit can grow. They also make honey."),
    (("What is honey?", "Where does honey come from?", "Who makes honey?"),
     "Honey is a sweet food that bees make from flowers."),
    (("Why is it dark at night?", "Why is the sky dark at night?"),
     "It is dark at night because the sun is on the other side of the world."),
    (("Why do people read books?", "Why should I read books?", "What are books good for?"),
     "People read books to learn new things and to enjoy good stories."),
    (("What is ice?", "Why is ice cold?"), "Ice is water that is so cold that it has frozen."),
    (("Why should we tell the truth?", "Why is it good to tell the truth?"),
     "We should tell the truth so that other people can trust us."),
    (("What is a friend?", "What makes a good friend?", "Who is a good friend?"),
     "A friend is someone who likes you, helps you and tells you the truth."),
    (("How do you make bread?", "How is bread made?", "How can I bake bread?"),
     "Mix flour, water, salt and yeast, let the dough rest, and bake it in a hot oven."),
    (("How do you plant a tree?", "How can I plant a tree?"),
     "Dig a hole, put the young tree in it, fill the hole with earth and water it well."),
    (("How do you make soup?", "How can I cook soup?"),
     "Cut some vegetables, put them in a pot with water and salt, and cook them until soft."),
    (("How do you fly a kite?", "How can I make a kite fly?"),
     "Wait for the wind, hold the string and run. When the kite rises, give it more string."),
    (("How do you make tea?", "How can I make a cup of tea?"),
     "Boil some water, pour it over the tea leaves and wait for a few minutes."),
    (("How do you catch a fish?", "How can I catch a fish?"),
     "Put a worm on the hook, throw the line into the water and wait quietly."),
    (("How do I find the way at night?", "How can I find my way in the dark?"),
     "Look for the light of the lighthouse, or follow the stars."),
    (("What is a river?", "What does a river do?"),
     "A river is a long stream of water that flows to a lake or to the sea."),
    (("What is a story?", "What is a story good for?"),
     "A story tells what happened to somebody. It can be true or made up."),
    (("What is a map?", "What is a map for?"), "A map is a picture that shows where places are."),
    (("What is the sun?", "What does the sun do?"),
     "The sun is a bright star. It gives us light and warmth."),
    (("What is the moon?", "What does the moon do?"),
     "The moon is a round world of stone that travels around the earth."),
    (("What is a computer?", "What does a computer do?"),
     "A computer is a machine that follows instructions very fast."),
    (("What do cows eat?", "Why do cows eat grass?"),
     "Cows eat grass and turn it into milk."),
    (("What is a kite?", "What is a kite made of?"),
     "A kite is made of paper and sticks, and it flies in the wind on a long string."),
    (("What should I do when I am sad?", "I am sad.", "I feel sad today."),
     "I am sorry that you are sad. Talk to a friend, take a walk, or let me tell you a story."),
    (("I am bored.", "What should I do today?", "I have nothing to do."),
     "You could fly a kite, read a book, or ask me for a story."),
    (("What is your favourite colour?", "Which colour do you like best?"),
     "I like blue best, like the lake on a summer morning."),
    (("What is your favourite animal?", "Which animal do you like best?"),
     "I like Rusty, the miller's dog, because he is friendly to everyone."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the duck cross the lake? Because the bridge was too slow!"),
)  # fmt: skip

SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "sheep": "bleats",
    "owl": "hoots", "horse": "neighs", "bee": "buzzes", "mouse": "squeaks", "frog": "croaks",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("fast", "slow"),
    ("happy", "sad"), ("wet", "dry"), ("light", "dark"), ("open", "closed"), ("left", "right"),
    ("full", "empty"), ("strong", "weak"), ("early", "late"), ("long", "short"),
)  # fmt: skip
MIXTURES = (
    ("red", "blue", "purple"), ("blue", "yellow", "green"), ("red", "yellow", "orange"),
    ("black", "white", "grey"), ("red", "white", "pink"),
)  # fmt: skip
SIZES = ("mouse", "rabbit", "cat", "sheep", "cow", "house", "mountain")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip
